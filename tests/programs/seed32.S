/*
 * The program that the seeds' user-space examples are written for: appln, testapp and bench_loop in one.
 * i386, without a C library: as --32, ld -m elf_i386. main starts with 0x55, loop with 0x48.
 */
	.text
	.globl _start, main, loop
	.type _start, @function
_start:
	mov $0x11111111, %eax
	mov $0x22222222, %ebx
	mov $text, %ecx
	call main
	mov $3, %eax
	call bench
	mov $1, %eax		/* exit(0) */
	xor %ebx, %ebx
	int $0x80
	.size _start, . - _start

	.type main, @function
main:
	push %ebp
	mov %esp, %ebp
	pop %ebp
	ret
	.size main, . - main

	.type bench, @function
bench:
loop:	dec %eax
	nop
	jnz loop
	ret
	.size bench, . - bench

	.data
text:	.asciz "a string that ECX points to"

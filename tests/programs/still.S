/*
 * still: fills general, SSE and x87 registers with known values, says "ready", and stays at one instruction for ever.
 * A signal, an injected call or a death of the tracer that changed a register would show.
 */
#include <asm/unistd.h>
	.data
text:	.ascii "ready\n"
	.balign 16
values:	.long 1, 2, 3, 4, 5, 6, 7, 8
single:	.float 2.5

	.text
	.globl main
main:
#ifdef __x86_64__
	mov $__NR_write, %eax
	mov $1, %edi
	lea text(%rip), %rsi
	mov $6, %edx
	syscall
	lea values(%rip), %rax
	movups (%rax), %xmm3
	movups 16(%rax), %xmm12
	flds single(%rip)
	mov $0x1111111111111111, %rax
	mov $0x2222222222222222, %rbx
	mov $0x3333333333333333, %rcx
	mov $0x4444444444444444, %r8
	mov $0x5555555555555555, %r15
#else
	mov $__NR_write, %eax
	mov $1, %ebx
	mov $text, %ecx
	mov $6, %edx
	int $0x80
	movups values, %xmm3
	flds single
	mov $0x11111111, %eax
	mov $0x22222222, %ebx
	mov $0x33333333, %ecx
	mov $0x44444444, %esi
#endif
	cmp $7, %eax
	std
	.globl here
here:	jmp here
	.section .note.GNU-stack,"",%progbits

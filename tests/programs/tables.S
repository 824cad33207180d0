/*
 * tables N: prints the sum of the N words at the start of a table that lies between functions, and 5. Hand-written
 * assembly mostly gives its labels no type; what is code says the unwind table at best.
 */
	.text
	.globl	main
	.type	main, @function
main:
	.cfi_startproc
	push	%rbx
	.cfi_def_cfa_offset 16
	mov	8(%rsi), %rdi
	call	atoi@PLT
	mov	%eax, %ecx
	xor	%esi, %esi
	lea	table(%rip), %rbx
1:	add	(%rbx), %esi
	add	$4, %rbx
	dec	%ecx
	jnz	1b
	call	described
	mov	%eax, %edx
	lea	format(%rip), %rdi
	xor	%eax, %eax
	call	printf@PLT
	xor	%eax, %eax
	pop	%rbx
	ret
	.cfi_endproc
	.size	main, . - main

	.p2align 4
table:
	.long	0x55, 0x90909090, 7, 0xc3
	.type	constants, @object
constants:
	.long	0x55, 1, 2, 3
	.size	constants, . - constants

	.p2align 4
described:
	.cfi_startproc
	mov	$5, %eax
	call	undescribed
	ret
	.cfi_endproc

	.p2align 4
undescribed:
	nop
	ret

	.section .rodata
format:	.string	"%u %d\n"
	.section .note.GNU-stack, "", @progbits

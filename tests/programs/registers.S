/* Sets every general register to a value of its own and stops at `here', three times. */
	.text
	.globl main
	.type main, @function
main:
	push %rbx
	push %rbp
	push %r12
	push %r13
	push %r14
	push %r15
	push $3
again:
	xor %eax, %eax
	movabs $0x0101010101010101, %rax
	movabs $0x8202020202020202, %rbx
	movabs $0x0303030303030303, %rcx
	movabs $0x8404040404040404, %rdx
	movabs $0x0505050505050505, %rsi
	movabs $0x8606060606060606, %rdi
	movabs $0x0707070707070707, %rbp
	movabs $0x8808080808080808, %r8
	movabs $0x0909090909090909, %r9
	movabs $0x8a0a0a0a0a0a0a0a, %r10
	movabs $0x0b0b0b0b0b0b0b0b, %r11
	movabs $0x8c0c0c0c0c0c0c0c, %r12
	movabs $0x0d0d0d0d0d0d0d0d, %r13
	movabs $0x8e0e0e0e0e0e0e0e, %r14
	movabs $0x0f0f0f0f0f0f0f0f, %r15
	stc
	.globl here
	.type here, @function
here:
	cmc
	mov %ds, %eax
	decl (%rsp)
	jnz again
	pop %rax
	pop %r15
	pop %r14
	pop %r13
	pop %r12
	pop %rbp
	pop %rbx
	xor %eax, %eax
	ret
	.size main, . - main
	.section .note.GNU-stack, "", @progbits

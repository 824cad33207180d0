/* x86-64: the way into a form and out of it; see harness.c. */
	.intel_syntax noprefix
	.text

#define FOR_ALL(DO) \
	DO(rax, 0); DO(rcx, 1); DO(rdx, 2); DO(rbx, 3); DO(rbp, 5); DO(rsi, 6); DO(rdi, 7); DO(r8, 8); DO(r9, 9); \
	DO(r10, 10); DO(r11, 11); DO(r12, 12); DO(r13, 13); DO(r14, 14); DO(r15, 15); DO(rsp, 4)
#define LOAD(register, number) mov register, [rip + in_registers + 8 * number]
#define STORE(register, number) mov [rip + out_registers + 8 * number], register

	.globl	_start
_start:
	mov	rdi, rsp
	and	rsp, -16
	call	start

/* Load the whole state, last the stack pointer, and jump into the form. */
	.globl	enter_form
enter_form:
	push	rbx
	push	rbp
	push	r12
	push	r13
	push	r14
	push	r15
	mov	[rip + kept_sp], rsp
	xor	edx, edx
	mov	ds, edx
	mov	es, edx
	mov	eax, [rip + x_mask]
	test	eax, eax
	jz	1f
	xrstor64 [rip + in_x]
	jmp	2f
1:	fxrstor64 [rip + in_x]
2:	push	[rip + in_flags]
	popfq
	FOR_ALL(LOAD)
	jmp	[rip + entry]

/* Save it all. A form jumps here when it is done, and a signal handler returns here after a fault. */
	.globl	leave_form
leave_form:
	FOR_ALL(STORE)
	mov	rsp, [rip + kept_sp]
	pushfq
	pop	[rip + out_flags]
	push	0x202
	popfq
	mov	eax, [rip + x_mask]
	xor	edx, edx
	test	eax, eax
	jz	1f
	xsave64	[rip + out_x]
	jmp	2f
1:	fxsave64 [rip + out_x]
2:	mov	[rip + out_selectors], cs
	mov	[rip + out_selectors + 4], ss
	mov	[rip + out_selectors + 8], ds
	mov	[rip + out_selectors + 12], es
	mov	[rip + out_selectors + 16], fs
	mov	[rip + out_selectors + 20], gs
	pop	r15
	pop	r14
	pop	r13
	pop	r12
	pop	rbp
	pop	rbx
	ret

/* The kernel leaves the alignment check flag of the form on, which compiled code does not expect. */
	.globl	on_signal_entry
on_signal_entry:
	pushfq
	and	dword ptr [rsp], ~0x40000
	popfq
	jmp	on_signal

	.globl	restorer
restorer:
	mov	eax, 15		/* rt_sigreturn */
	syscall

	.section .note.GNU-stack, "", @progbits

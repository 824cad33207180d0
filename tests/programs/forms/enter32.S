/* i386: the way into a form and out of it; see harness.c. */
	.intel_syntax noprefix
	.text

#define FOR_ALL(DO) \
	DO(eax, 0); DO(ecx, 1); DO(edx, 2); DO(ebx, 3); DO(ebp, 5); DO(esi, 6); DO(edi, 7); DO(esp, 4)
#define LOAD(register, number) mov register, [in_registers + 4 * number]
#define STORE(register, number) mov [out_registers + 4 * number], register

	.globl	_start
_start:
	mov	eax, esp
	and	esp, -16
	push	0
	push	0
	push	0
	push	eax
	call	start

	.globl	system_call
system_call:
	push	ebp
	push	ebx
	push	esi
	push	edi
	mov	eax, [esp + 20]
	mov	ebx, [esp + 24]
	mov	ecx, [esp + 28]
	mov	edx, [esp + 32]
	mov	esi, [esp + 36]
	mov	edi, [esp + 40]
	mov	ebp, [esp + 44]
	int	0x80
	pop	edi
	pop	esi
	pop	ebx
	pop	ebp
	ret

/* Load the whole state, last the stack pointer, and jump into the form. */
	.globl	enter_form
enter_form:
	push	ebx
	push	ebp
	push	esi
	push	edi
	mov	[kept_sp], esp
	mov	eax, [x_mask]
	xor	edx, edx
	test	eax, eax
	jz	1f
	xrstor	[in_x]
	jmp	2f
1:	fxrstor	[in_x]
2:	push	[in_flags]
	popfd
	FOR_ALL(LOAD)
	jmp	[entry]

/* Save it all. A form jumps here when it is done, and a signal handler returns here after a fault. */
	.globl	leave_form
leave_form:
	FOR_ALL(STORE)
	mov	esp, [kept_sp]
	pushfd
	pop	[out_flags]
	push	0x202
	popfd
	mov	eax, [x_mask]
	xor	edx, edx
	test	eax, eax
	jz	1f
	xsave	[out_x]
	jmp	2f
1:	fxsave	[out_x]
2:	mov	[out_selectors], cs
	mov	[out_selectors + 4], ss
	mov	[out_selectors + 8], ds
	mov	[out_selectors + 12], es
	mov	[out_selectors + 16], fs
	mov	[out_selectors + 20], gs
	push	ss
	pop	ds
	push	ss
	pop	es
	pop	edi
	pop	esi
	pop	ebp
	pop	ebx
	ret

/* The kernel leaves the alignment check flag of the form on, which compiled code does not expect. */
	.globl	on_signal_entry
on_signal_entry:
	pushfd
	and	dword ptr [esp], ~0x40000
	popfd
	jmp	on_signal

	.globl	restorer
restorer:
	mov	eax, 173	/* rt_sigreturn */
	int	0x80

	.section .note.GNU-stack, "", @progbits

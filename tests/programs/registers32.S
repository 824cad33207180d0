/* Sets every general register of i386 to a value of its own and stops at `here', three times. */
	.text
	.globl main
	.type main, @function
main:
	push %ebx
	push %ebp
	push %esi
	push %edi
	push $3
again:
	xor %eax, %eax
	mov $0x01010101, %eax
	mov $0x82020202, %ebx
	mov $0x03030303, %ecx
	mov $0x84040404, %edx
	mov $0x05050505, %esi
	mov $0x86060606, %edi
	mov $0x07070707, %ebp
	stc
	.globl here
	.type here, @function
here:
	cmc
	decl (%esp)
	jnz again
	pop %eax
	pop %edi
	pop %esi
	pop %ebp
	pop %ebx
	xor %eax, %eax
	ret
	.size main, . - main
	.section .note.GNU-stack, "", @progbits

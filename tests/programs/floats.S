/*
 * Passes `at_first' with floating-point and vector registers in their initial state, and `when_loaded' with values of their
 * own in all of them; ends with 0 if a vector register is the same behind that. With AVX=1, upper halves as well.
 */
#if AVX
#define LOAD vmovdqu
#define V(n) %ymm##n
#define EACH 32
#else
#define LOAD movdqu
#define V(n) %xmm##n
#define EACH 16
#endif
#ifdef __x86_64__
#define SI %rsi
#define SP %rsp
#define COUNT 16
#else
#define SI %esi
#define SP %esp
#define COUNT 8
#endif
	.text
	.globl main, at_first, when_loaded
	.type main, @function
main:
	push SI
#if AVX
	vzeroall
#else
	.irp n, 0, 1, 2, 3, 4, 5, 6, 7
	pxor %xmm\n, %xmm\n
	.endr
#endif
	fninit
at_first:
	nop
#ifdef __x86_64__
	lea values(%rip), SI
	lea control(%rip), %rdi
#else
	call 1f
1:	pop SI
	lea control-1b(SI), %edi
	lea values-1b(SI), SI
#endif
	LOAD (SI), V(0)
	LOAD 1*EACH(SI), V(1)
	LOAD 2*EACH(SI), V(2)
	LOAD 3*EACH(SI), V(3)
	LOAD 4*EACH(SI), V(4)
	LOAD 5*EACH(SI), V(5)
	LOAD 6*EACH(SI), V(6)
	LOAD 7*EACH(SI), V(7)
#ifdef __x86_64__
	LOAD 8*EACH(SI), V(8)
	LOAD 9*EACH(SI), V(9)
	LOAD 10*EACH(SI), V(10)
	LOAD 11*EACH(SI), V(11)
	LOAD 12*EACH(SI), V(12)
	LOAD 13*EACH(SI), V(13)
	LOAD 14*EACH(SI), V(14)
	LOAD 15*EACH(SI), V(15)
	fldt 24(%rdi)
	fldt 40(%rdi)
	fldz
	fldpi
	fld1
	fchs
	fldcw (%rdi)
	ldmxcsr 8(%rdi)
	fistl 12(%rdi)
#else
	fldt 24(%edi)
	fldt 40(%edi)
	fldz
	fldpi
	fld1
	fchs
	fldcw (%edi)
	ldmxcsr 8(%edi)
	fistl 12(%edi)
#endif
when_loaded:
	cmc
	/* What the processor has now, of one register, against what was loaded. */
	sub $EACH, SP
	xor %eax, %eax
#if AVX
	vmovdqu V(3), (SP)
#else
	movdqu V(3), (SP)
#endif
	mov $EACH/4-1, %ecx
#ifdef __x86_64__
3:	mov (%rsp,%rcx,4), %edx
	cmp 3*EACH(%rsi,%rcx,4), %edx
#else
3:	mov (%esp,%ecx,4), %edx
	cmp 3*EACH(%esi,%ecx,4), %edx
#endif
	je 4f
	mov $1, %eax
4:	dec %ecx
	jns 3b
	add $EACH, SP
	fninit
#if AVX
	vzeroupper
#endif
	pop SI
	ret
	.size main, . - main

	.data
	.balign 32
values:
	.set n, 1
	.rept COUNT*EACH/4
	.long 0x01000193*n
	.set n, n+1
	.endr
	.balign 16
control:
	.quad 0x0e7f		/* fcw: another rounding, all exceptions masked */
	.long 0x5fa0		/* mxcsr: another rounding, the precision flag */
	.long 0
	.quad 0
	.quad 0x8000000000000000	/* infinity */
	.quad 0x7fff
	.quad 0x0000000000000123	/* denormal */
	.quad 0x8000
	.section .note.GNU-stack, "", @progbits

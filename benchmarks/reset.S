# What a PC has at its reset, and nothing else: it counts, at 0x600.
	.code16
	.text
start:	xor	%ax, %ax
	mov	%ax, %es
	mov	$0xf000, %ax
	mov	%ax, %ds
	mov	$count, %si
	mov	$0x600, %di
	mov	$end - count, %cx
	rep movsb
	ljmp	$0, $0x600
count:	inc	%ebx
	jmp	count
end:
	.org	0xfff0
	ljmp	$0xf000, $start
	.org	0x10000

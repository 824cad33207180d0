# What a PowerPC has at its reset, and nothing else: it lets its decrementer interrupt it, and counts that at COUNTER. The
# firmware of a Macintosh of 1998 begins at 0xffc00000, and vectors are at 0xfff00000 until a system says otherwise.
	.set COUNTER, 0x1000
	.set PERIOD, 20000
	.set VECTORS, 0x300000

	.text
	.org VECTORS + 0x100
reset:	li 1, COUNTER
	li 2, 0
	stw 2, 0(1)
	li 2, PERIOD
	mtdec 2
	mfmsr 2
	ori 2, 2, 0x8000	# external interrupts
	mtmsr 2
idle:	addi 3, 3, 1
	b idle

	.org VECTORS + 0x900
	lwz 4, 0(1)
	addi 4, 4, 1
	stw 4, 0(1)
	li 4, PERIOD
	mtdec 4
	rfi

	.org 0x3ffffc
	.long 0

/* entryless: functions whose entries are no other than jumps to them, or than their returns. */
#include <stdio.h>

__asm__(".text\n"
	".globl again\n"
	".type again, @function\n"
	"again:\n\t"
	".cfi_startproc\n\t"
	"dec %edi\n\t"
	"jnz again\n\t"
	"xor %eax, %eax\n\t"
	"ret\n\t"
	".cfi_endproc\n"
	".size again, . - again\n"
	".globl bare\n"
	".type bare, @function\n"
	"bare:\n\t"
	".cfi_startproc\n\t"
	"ret\n\t"
	".cfi_endproc\n"
	".size bare, . - bare\n");

int again(int n);
void bare(void);

int main(void)
{
	for (int n = 0; n < 3; n++)
		bare();
	printf("%d\n", again(5));
	return 0;
}

/* patched: functions that a test patches while the program waits for the end of its input. */
#include <stdio.h>
#include <unistd.h>

__attribute__((noipa, aligned(4096))) int first(int n)
{
	return n + 1;
}

__attribute__((noipa, aligned(4096))) int second(int n)
{
	return n * 3;
}

__attribute__((noipa, aligned(4096))) int third(int n)
{
	return n - 5;
}

/* A nop of five bytes, which newer kernels replace by a call. */
__attribute__((noipa)) int landing(int n)
{
	__asm__ volatile(".globl nop_of_5\nnop_of_5: .byte 0x0f, 0x1f, 0x44, 0, 0");
	return n;
}

/* An instruction that begins in one page and ends in the next. */
__asm__(".text\n.p2align 12\n.fill 4094, 1, 0x90\n.globl across\n.type across, @function\n"
	"across: movl $0x12345678, %eax\nret\n.size across, . - across\n");
int across(void);

int main(void)
{
	char line[16];
	int sum = 0;

	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin)) {
		for (int n = 0; n < 100; n++)
			sum += landing(first(second(third(n)))) + across();
		printf("%d\n", sum != 0);
		fflush(stdout);
	}
	return 0;
}

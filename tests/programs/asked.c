/*
 * asked: for each line `N' of standard input call answer(1) to answer(N), for each line `f N' let a child do so; then
 * print the process id and the sum. answer() has pages of its own, far from what is executed before.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

volatile unsigned long total;
#ifdef OLDER
volatile unsigned long unused;
#endif

__asm__(".section .text.far, \"ax\", @progbits\n.balign 262144\n.skip 262144, 0xcc\n.previous");

__attribute__((noinline, noclone, section(".text.far"))) unsigned long answer(unsigned long n)
{
	total += n;
	return n + 1;
}

__attribute__((noinline)) static void work(unsigned long count)
{
	total = 0;
	for (unsigned long n = 1; n <= count; n++)
		if (answer(n) != n + 1)
			abort();
	printf("%d %lu\n", (int)getpid(), total);
	fflush(stdout);
}

int main(void)
{
	char line[64];

	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin)) {
		if (line[0] != 'f') {
			work(strtoul(line, NULL, 0));
		} else if (!fork()) {
			work(strtoul(line + 1, NULL, 0));
			_exit(0);
		} else {
			wait(NULL);
		}
	}
	return 0;
}

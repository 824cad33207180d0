/* owntrap COUNT: a program with breakpoints of its own; status 0 if each of them reached its SIGTRAP handler. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

static volatile int traps;
static volatile unsigned long sum;

__attribute__((noinline, noclone)) unsigned long tick(unsigned long n)
{
	sum += n;
	return n + 1;
}

static void on_trap(int number, siginfo_t *info, void *context)
{
	traps++;
	if (info->si_code != SI_KERNEL)
		exit(3);
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_sigaction = on_trap, .sa_flags = SA_SIGINFO };
	int count = atoi(argv[1]);

	sigaction(SIGTRAP, &action, NULL);
	for (int n = 0; n < count; n++) {
		tick(n);
		__asm__ volatile("int3");
	}
	printf("%d\n", traps);
	return traps == count ? 0 : 1;
}

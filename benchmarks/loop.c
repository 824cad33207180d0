/*
 * The paper's loop: dec, nop, jnz. Runs it as often as the first argument says and prints nanoseconds per iteration,
 * measured in here, so that nobody's start-up counts.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

__asm__(".text\n"
	".globl run_loop\n"
	".type run_loop, @function\n"
	"run_loop:\n\t"
	"mov %edi, %eax\n"
	".globl loop\n"
	"loop:\n\t"
	"dec %eax\n\t"
	"nop\n\t"
	"jnz loop\n\t"
	"ret\n"
	".size run_loop, . - run_loop\n");

void run_loop(int count);

__asm__(".globl called\n"
	".type called, @function\n"
	"called:\n\t"
	"push %rbp\n\t"
	"mov %rsp, %rbp\n\t"
	"mov %rdi, %rax\n\t"
	"pop %rbp\n\t"
	"ret\n"
	".size called, . - called\n");

long called(long n);

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

int main(int argc, char **argv)
{
	int count = argc > 1 ? atoi(argv[1]) : 1000;
	double start = now();
	if (argc > 2)
		for (int n = 0; n < count; n++)
			called(n);
	else
		run_loop(count);
	fprintf(stderr, "LOOP %.1f\n", (now() - start) / count);
	return 0;
}

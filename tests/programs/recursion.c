/*
 * recursion COUNT: calls step() COUNT times, fib() and deep() recursively, and jump_out(), which is left by longjmp().
 * Functions that are not called keep those apart that are.
 */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#define OPAQUE __attribute__((noipa, used, aligned(16)))

static volatile unsigned long sum;
static jmp_buf out;

OPAQUE unsigned long step(unsigned long n)
{
	sum += n;
	return n + 1;
}

OPAQUE unsigned long apart(unsigned long n)
{
	return n * 3;
}

OPAQUE unsigned long fib(unsigned long n)
{
	unsigned long result = n;
	if (n > 1) {
		result = fib(n - 1);
		result += fib(n - 2);
	}
	return result;
}

OPAQUE unsigned long apart_too(unsigned long n)
{
	return n * 5;
}

OPAQUE unsigned long deep(unsigned long n)
{
	unsigned long result = 0;
	if (n)
		result = deep(n - 1) * 3 + 1;
	return result;
}

OPAQUE unsigned long apart_as_well(unsigned long n)
{
	return n * 7;
}

OPAQUE unsigned long jump_out(unsigned long n)
{
	if (n & 1)
		longjmp(out, 1);
	return n;
}

OPAQUE unsigned long last(unsigned long n)
{
	return n * 9;
}

int main(int argc, char **argv)
{
	unsigned long count = argc > 1 ? strtoul(argv[1], NULL, 0) : 1000;
	for (unsigned long n = 0; n < count; n++)
		if (step(n) != n + 1)
			abort();
	static volatile unsigned long k;
	for (k = 0; k < count; k++)
		if (!setjmp(out))
			jump_out(k);
	printf("%lu %lu %lu\n", sum, fib(20), deep(5000));
	return 0;
}

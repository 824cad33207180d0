/* marked COUNT: call "entered", which begins with a landing mark and a push if built with -fcf-protection. */
#include <stdio.h>
#include <stdlib.h>

__attribute__((noipa)) int other(int n)
{
	return n ^ 5;
}

__attribute__((noipa)) long entered(long n, long *stack)
{
	*stack = (long)__builtin_dwarf_cfa();
	return other(n) + n;
}

int main(int argc, char **argv)
{
	long count = argc > 1 ? atol(argv[1]) : 0, sum = 0, stack = 0;

	for (long n = 0; n < count; n++)
		sum += entered(n, &stack);
	printf("%lx %ld\n", stack, sum);
	return 0;
}

/* Calls fib() recursively, and at the end of tail() by a jump. */
#include <stdio.h>

__attribute__((noipa)) int fib(int n)
{
	return n < 2 ? n : fib(n - 1) + fib(n - 2);
}

__attribute__((noipa, optimize("optimize-sibling-calls"))) int tail(int n)
{
	return fib(n);
}

int main(void)
{
	printf("%d %d\n", fib(5), tail(3));
	return 0;
}

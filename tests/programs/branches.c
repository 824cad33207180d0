/* Functions full of branches: a loop, a switch, calls through pointers. */
#include <stdio.h>

__attribute__((noipa)) int collatz(long n)
{
	int steps = 0;
	while (n != 1) {
		n = n & 1 ? 3 * n + 1 : n / 2;
		steps++;
	}
	return steps;
}

__attribute__((noipa)) int pick(int n)
{
	switch (n) {
	case 0: return 1;
	case 1: return 5;
	case 2: return n;
	default: return 1;
	}
}

int main(void)
{
	int (*volatile chosen)(int) = pick;
	int sum = 0;
	for (int n = 0; n < 4; n++)
		sum += chosen(n);
	printf("%d %d\n", collatz(6), sum);
	return 0;
}

/* Calls tick() as often as the first argument says; tick_sum checks that none was lost or doubled. */
#include <stdio.h>
#include <stdlib.h>

static volatile unsigned long sum;

__attribute__((noinline, noclone)) unsigned long tick(unsigned long n)
{
	sum += n;
	return n + 1;
}

int main(int argc, char **argv)
{
	unsigned long count = argc > 1 ? strtoul(argv[1], NULL, 0) : 1000;
	for (unsigned long n = 0; n < count; n++)
		if (tick(n) != n + 1)
			abort();
	printf("%lu\n", sum);
	return sum == count * (count - 1) / 2 ? 0 : 1;
}

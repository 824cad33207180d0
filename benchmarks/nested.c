/*
 * nested ROUNDS   calls functions that call each other, and prints the nanoseconds that a call of the fastest
 *                 round has taken
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define FUNCTION __attribute__((noipa, noinline))
#define OTHER __attribute__((no_instrument_function))
#define TIMES 1000
#define CALLS 8 /* for each time: one of "outer", two of "middle", five of "leaf" */

static volatile long sink;

FUNCTION long leaf(long n)
{
	sink = n;
	return n * 3 + sink;
}

FUNCTION long middle(long n)
{
	return leaf(n) + leaf(n + 1) + 1;
}

FUNCTION long outer(long n)
{
	return middle(n) + middle(n + 1) + leaf(n) + 1;
}

OTHER static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

OTHER int main(int argc, char **argv)
{
	double best = 1e18;
	long sum = 0;

	for (long rounds = argc > 1 ? atol(argv[1]) : 100; rounds > 0; rounds--) {
		double begin = now();
		for (long n = 0; n < TIMES; n++)
			sum += outer(n);
		double took = now() - begin;
		best = took < best ? took : best;
	}
	fprintf(stderr, "took %.3f\n", best / TIMES / CALLS);
	return sum == 1;
}

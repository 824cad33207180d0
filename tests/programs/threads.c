/*
 * threads COUNT ITERATIONS [short]: COUNT threads call tick() ITERATIONS times each; with "short", every call is made by
 * a thread of its own. tick() begins with an instruction that has to be single-stepped. Ends with status 0 if no call
 * was lost or doubled; prints the number of calls.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static atomic_ulong calls;
static atomic_ulong sum;
static volatile unsigned long bias = 3;
static unsigned long iterations;

__attribute__((noinline, noclone)) unsigned long tick(unsigned long n)
{
	unsigned long value = bias + n;
	atomic_fetch_add(&calls, 1);
	return value;
}

static void *work(void *arg)
{
	unsigned long own = 0;
	for (unsigned long n = 0; n < iterations; n++)
		own += tick(n);
	atomic_fetch_add(&sum, own);
	return arg;
}

int main(int argc, char **argv)
{
	int count = atoi(argv[1]);
	unsigned long rounds = 1, total = strtoul(argv[2], NULL, 0);
	pthread_t ids[64];

	iterations = total;
	if (argc > 3) {
		rounds = total;
		iterations = 1;
	}
	for (unsigned long round = 0; round < rounds; round++) {
		for (int n = 0; n < count; n++)
			if (pthread_create(&ids[n], NULL, work, NULL))
				return 2;
		for (int n = 0; n < count; n++)
			pthread_join(ids[n], NULL);
	}
	printf("%lu\n", calls);
	unsigned long one = iterations * (iterations - 1) / 2 + 3 * iterations;
	return calls == total * count && sum == one * count * rounds ? 0 : 1;
}

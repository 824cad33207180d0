/*
 * called          calls two functions again and again, and prints for each round what a call of each takes, in
 *                 nanoseconds: of "hot", which is to be probed, and of "cold", which is not; until it is killed
 */
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define CALLS 20000
#define PAUSE 2000

#define FUNCTION __attribute__((noinline, noclone))

static volatile long sink;
static const char text[] = "a string of 20 bytes";

FUNCTION void hot(long a, long b, long c, long d)
{
	sink = a + b + c + d;
	__asm__ volatile("" : : : "memory");
}

FUNCTION __attribute__((no_instrument_function)) void cold(long a, long b, long c, long d)
{
	sink = a ^ b ^ c ^ d;
	__asm__ volatile("" : : : "memory");
}

static __attribute__((no_instrument_function)) double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

__attribute__((no_instrument_function)) int main(void)
{
	for (;;) {
		double begin = now();
		for (long n = 0; n < CALLS; n++)
			hot(n, n + 1, n + 2, (long)text);
		double middle = now();
		for (long n = 0; n < CALLS; n++)
			cold(n, n + 1, n + 2, n + 3);
		double end = now();
		printf("%.3f %.3f\n", (middle - begin) / CALLS, (end - middle) / CALLS);
		fflush(stdout);
		usleep(PAUSE);
	}
}

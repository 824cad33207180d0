/*
 * pair THREADS SECONDS    calls of a function by some threads, each as fast as it can
 *
 * They begin as soon as the function begins with a jump to a handler. Prints how many calls there were, and the
 * seconds of processor time that they took.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { JUMP = 0xe9, PATIENCE = 60, AT_ONCE = 1000, THREADS_MAX = 64 };

__attribute__((noinline, noclone)) long called(long n, long two, long three, long four)
{
	__asm__ volatile("" ::: "memory");
	return n + 0x12345;
}

static double seconds;
static atomic_int begun;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *work(void *unused)
{
	long n = 0;
	double end;

	while (!begun)
		usleep(1000);
	for (end = now() + seconds; now() < end;)
		for (int i = 0; i < AT_ONCE; i++)
			called(n++, 2, 3, 4);
	return (void *)n;
}

int main(int argc, char **argv)
{
	int threads = argc > 1 ? atoi(argv[1]) : 2;
	pthread_t all[THREADS_MAX];
	long calls = 0;
	double limit = now() + PATIENCE;
	struct timespec used;

	seconds = argc > 2 ? atof(argv[2]) : 1;
	for (int i = 0; i < threads && i < THREADS_MAX; i++)
		pthread_create(&all[i], NULL, work, NULL);
	while (*(volatile unsigned char *)called != JUMP && now() < limit)
		usleep(1000);
	if (*(volatile unsigned char *)called != JUMP)
		return 1;
	usleep(200000);
	begun = 1;
	for (int i = 0; i < threads && i < THREADS_MAX; i++) {
		void *n;

		pthread_join(all[i], &n);
		calls += (long)n;
	}
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
	printf("%ld %.3f\n", calls, used.tv_sec + used.tv_nsec * 1e-9);
	return 0;
}

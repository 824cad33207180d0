/*
 * leaderless SECONDS [vfork | slow]: the first thread ends, and another one calls tick() until the time is over. With
 * "vfork", a vfork child calls it for half the time and then its parent; with "slow", once every 200 ms.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static volatile unsigned long sum;
static double seconds;
static int pause_us = 200;

__attribute__((noinline, noclone)) unsigned long tick(unsigned long n)
{
	sum += n;
	return n + 1;
}

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

static void call_for(double time)
{
	double end = now() + time;
	for (unsigned long n = 0; now() < end; n++) {
		if (tick(n) != n + 1)
			exit(1);
		usleep(pause_us);
	}
}

static void *work(void *arg)
{
	call_for(seconds);
	exit(0);
	return arg;
}

int main(int argc, char **argv)
{
	pthread_t id;

	seconds = atof(argv[1]);
	if (argc > 2 && !strcmp(argv[2], "vfork")) {
		if (vfork() == 0) {
			char line[16];
			int length = sprintf(line, "%d\n", (int)getpid());
			if (write(1, line, length) != length)
				_exit(1);
			call_for(seconds / 2);
			_exit(0);
		}
		call_for(seconds / 2);
		return 0;
	}
	if (argc > 2)
		pause_us = 200000;
	printf("ready\n");
	fflush(stdout);
	if (argc > 2)
		call_for(seconds);
	pthread_create(&id, NULL, work, NULL);
	pthread_exit(NULL);
}

/*
 * broods MIB PAUSE: as soon as there is a character to read, makes a child every PAUSE milliseconds until there is another
 * one. They call a function until their parent has read a third one; it prints how many did not end as they should. The
 * memory of the parent, MIB of it, takes its time to be copied. Another thread of it only sleeps.
 */
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile unsigned long bias = 7;

__attribute__((noinline, noclone)) unsigned long called(unsigned long n)
{
	return bias + n;
}

static char wait_for_one(void)
{
	char read_one = 0;

	return read(0, &read_one, 1) == 1 && read_one;
}

static void *sleep_on(void *unused)
{
	for (;;)
		pause();
	return unused;
}

int main(int argc, char **argv)
{
	struct pollfd input = { 0, POLLIN, 0 };
	int wrong = 0, status, between = atoi(argv[2]);
	size_t size = (size_t)atoi(argv[1]) << 20;
	pthread_t sleeper;

	if (argc != 3 || (size && !memset(malloc(size), 1, size)))
		return 2;
	pthread_create(&sleeper, NULL, sleep_on, NULL);
	puts("ready");
	fflush(stdout);
	wait_for_one();
	do {
		if (!fork()) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			for (unsigned long n = 0; called(n) == n + 7; n++)
				usleep(10000);
			_exit(1);
		}
	} while (!poll(&input, 1, between));
	wait_for_one();
	puts("made");
	fflush(stdout);
	wait_for_one();
	signal(SIGTERM, SIG_IGN);
	kill(0, SIGTERM);
	while (wait(&status) > 0)
		wrong += !WIFSIGNALED(status) || WTERMSIG(status) != SIGTERM;
	printf("%d\n", wrong);
	return 0;
}

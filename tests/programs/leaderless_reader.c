/* leaderless_reader: the first thread ends, and another one waits for the end of the input. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_t leader;

static void *wait_for_end(void *arg)
{
	char c;

	pthread_join(leader, 0);
	puts("ready");
	fflush(stdout);
	exit(read(0, &c, 1) < 0);
	return arg;
}

int main(void)
{
	pthread_t thread;

	leader = pthread_self();
	pthread_create(&thread, 0, wait_for_end, 0);
	pthread_exit(0);
}

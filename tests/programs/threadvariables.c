/*
 * threadvariables THREADS CALLS: THREADS threads call tick() CALLS times each, one after another and all at once; then a
 * process of another forks, and the child executes this program with "again". Each call prints what the variable of its
 * thread has to be: how many calls the thread has made.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static long calls;

__attribute__((noipa)) void tick(long expected)
{
	__asm__ volatile("" ::"r"(expected));
}

static void *work(void *arg)
{
	for (long n = 1; n <= calls; n++)
		tick(n);
	return arg;
}

static void *execute(void *arg)
{
	tick(1);
	execl("/proc/self/exe", "threadvariables", "1", arg, "again", NULL);
	_exit(2);
}

int main(int argc, char **argv)
{
	int count = atoi(argv[1]), status;
	pthread_t ids[64];

	calls = atol(argv[2]);
	if (argc > 3) {
		work(NULL);
		return 0;
	}
	for (int n = 0; n < count; n++)
		if (pthread_create(&ids[n], NULL, work, NULL))
			return 2;
	for (int n = 0; n < count; n++)
		pthread_join(ids[n], NULL);
	for (int n = 0; n < count; n++) {
		pthread_create(&ids[0], NULL, work, NULL);
		pthread_join(ids[0], NULL);
	}
	work(NULL);
	if (!fork()) {
		/* The child's first thread begins anew, and so does the program that another one of its threads executes. */
		work(NULL);
		pthread_create(&ids[0], NULL, execute, argv[2]);
		pthread_join(ids[0], NULL);
		_exit(3);
	}
	wait(&status);
	return status ? 3 : 0;
}

/*
 * Calls work() with the id of the thread, COUNT times in each of three threads and a child. With an argument it waits
 * for a line first.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT 100

__attribute__((noinline, noclone)) long work(long tid)
{
	__asm__ volatile("");
	return tid + 1;
}

static void *run(void *unused)
{
	for (int n = 0; n < COUNT; n++)
		if (work(syscall(SYS_gettid)) == 0)
			abort();
	return unused;
}

int main(int argc, char **argv)
{
	pthread_t threads[2];
	char line[16];

	(void)argv;
	puts("ready");
	fflush(stdout);
	if (argc > 1 && !fgets(line, sizeof(line), stdin))
		return 1;
	for (int n = 0; n < 2; n++)
		if (pthread_create(&threads[n], NULL, run, NULL))
			return 2;
	run(NULL);
	for (int n = 0; n < 2; n++)
		pthread_join(threads[n], NULL);
	pid_t child = fork();
	if (!child) {
		run(NULL);
		_exit(0);
	}
	int status;
	return waitpid(child, &status, 0) != child || status;
}

/*
 * systemcalls COUNT: makes COUNT times an lseek that fails, with arguments of which no two are alike, and a dup of
 * standard output; then runs a thread and a child that do the same once each.
 */
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define NO_DESCRIPTOR 999

static void call(int n)
{
	syscall(SYS_lseek, NO_DESCRIPTOR, (long)(1000 + n), 2);
	close(syscall(SYS_dup, 1));
}

static void *in_thread(void *argument)
{
	call(5000);
	return argument;
}

int main(int argc, char **argv)
{
	pthread_t thread;
	int status;

	for (int n = 0; argc > 1 && n < atoi(argv[1]); n++)
		call(n);
	pthread_create(&thread, NULL, in_thread, NULL);
	pthread_join(thread, NULL);
	if (fork() == 0) {
		call(6000);
		_exit(0);
	}
	wait(&status);
	return 0;
}

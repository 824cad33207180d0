/*
 * Threads and processes with names of their own call touch(), with a number that says who it is, and end at once. It
 * begins as soon as the code of touch() begins with a jump.
 *
 *    n          a thread that has called itself "thread-n"
 *    1000 + n   a process that has just been made, and is called as this one
 *    2000 + n   the same, which executes another program afterwards
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { JUMP = 0xe9, PATIENCE = 20, THREADS = 40, PROCESSES = 10 };

__attribute__((noinline, noclone)) unsigned long touch(unsigned long n)
{
	__asm__ volatile("" ::: "memory");
	return n + 0x12345;
}

static void *work(void *number)
{
	char name[16];

	snprintf(name, sizeof name, "thread-%ld", (long)number);
	prctl(PR_SET_NAME, name);
	touch((long)number);
	return NULL;
}

int main(void)
{
	time_t end = time(NULL) + PATIENCE;

	while (*(volatile unsigned char *)touch != JUMP && time(NULL) < end)
		usleep(1000);
	if (*(volatile unsigned char *)touch != JUMP)
		return 3;
	for (long n = 0; n < THREADS; n++) {
		pthread_t thread;

		pthread_create(&thread, NULL, work, (void *)n);
		pthread_join(thread, NULL);
	}
	for (int n = 0; n < 2 * PROCESSES; n++) {
		int executes = n >= PROCESSES;

		if (!fork()) {
			touch(executes ? 2000 + n - PROCESSES : 1000 + n);
			if (executes)
				execl("/bin/true", "something", (char *)NULL);
			_exit(0);
		}
		wait(NULL);
	}
	puts("done");
	return 0;
}

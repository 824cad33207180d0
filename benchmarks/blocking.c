/*
 * blocking MODE COUNT: wait for a byte from the parent; then call touched(), whose first instruction reads memory and so
 * is executed out of line, and at once after that, COUNT times: "read": block in read(2) until the parent writes; "sleep": sleep for 0.3 s; "exit": end the thread,
 * one for each call; "run": use the processor for 0.3 s.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

volatile unsigned long value = 7;

void touched(void);
__asm__(".text\n.globl touched\n.type touched, @function\ntouched: mov value(%rip), %rax\nret\n.size touched, . - touched");

static const struct timespec moment = { 0, 300000000 };

static void *ending(void *arg)
{
	touched();
	syscall(SYS_exit, 0);
	return arg;
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

int main(int count, char **arguments)
{
	char byte;
	pthread_t thread;
	if (read(0, &byte, 1) != 1)
		return 1;
	for (int n = count > 2 ? atoi(arguments[2]) : 0; n > 0; n--) {
		if (!strcmp(arguments[1], "read")) {
			touched();
			if (read(0, &byte, 1) != 1)
				return 1;
		} else if (!strcmp(arguments[1], "sleep")) {
			touched();
			nanosleep(&moment, NULL);
		} else if (!strcmp(arguments[1], "exit")) {
			if (pthread_create(&thread, NULL, ending, NULL))
				return 1;
			pthread_join(thread, NULL);
			nanosleep(&moment, NULL);
		} else {
			double until = now() + 300;
			touched();
			while (now() < until)
				;
		}
	}
	return 0;
}

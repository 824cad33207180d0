/*
 * torture SECONDS THREADS: threads call two functions in a tight loop until the time is over, while others are created
 * and end, children are forked, and a timer sends signals. SIGUSR2 ends it earlier. Status 0 if all sums are right and no
 * child failed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static atomic_int over, wrong, enough;
static volatile unsigned long bias = 7;

__attribute__((noinline, noclone)) unsigned long stepped(unsigned long n)
{
	return bias + n;
}

__attribute__((noinline, noclone)) unsigned long emulated(unsigned long n);
__asm__(".globl emulated\n.type emulated, @function\nemulated: push %rbp\nmov %rsp, %rbp\nlea 1(%rdi), %rax\npop %rbp\n"
	"ret\n.size emulated, . - emulated");

static void *spin(void *arg)
{
	for (unsigned long n = 0; !over; n++)
		if (stepped(n) != n + 7 || emulated(n) != n + 1)
			wrong = 1;
	return arg;
}

static void *once(void *arg)
{
	if (stepped(1) != 8)
		wrong = 2;
	return arg;
}

static void on_alarm(int number)
{
	if (number != SIGALRM || emulated(4) != 5)
		wrong = 3;
}

static void on_enough(int number)
{
	(void)number;
	enough = 1;
}

int main(int argc, char **argv)
{
	struct itimerval often = { { 0, 3000 }, { 0, 3000 } };
	struct timespec now, start;
	int count = atoi(argv[2]);
	pthread_t ids[16], id;

	signal(SIGALRM, on_alarm);
	signal(SIGUSR2, on_enough);
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (int n = 0; n < count; n++)
		pthread_create(&ids[n], NULL, spin, NULL);
	setitimer(ITIMER_REAL, &often, NULL);
	printf("ready\n");
	fflush(stdout);
	do {
		if (pthread_create(&id, NULL, once, NULL) == 0)
			pthread_join(id, NULL);
		pid_t pid = fork();
		if (pid == 0)
			_exit(stepped(2) == 9 && emulated(2) == 3 ? 0 : 1);
		int status;
		while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
			;
		if (status) {
			fprintf(stderr, "child %d ended with status %#x\n", pid, status);
			wrong = 4;
		}
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (!enough && now.tv_sec - start.tv_sec + (now.tv_nsec - start.tv_nsec) / 1e9 < atof(argv[1]));
	over = 1;
	for (int n = 0; n < count; n++)
		pthread_join(ids[n], NULL);
	return wrong;
}

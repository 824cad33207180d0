/*
 * Two processes that run in the same memory (CLONE_VM) and call tick() until SIGUSR1 comes. The first one prints the id
 * of the second one; its status is 0 if all results were right and nobody has died. The second one does not outlive it.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile sig_atomic_t is_over;
static char stack[65536] __attribute__((aligned(16)));

__attribute__((noinline, noclone)) unsigned long tick(unsigned long n)
{
	return n * 5 + 1;
}

static int call(void *unused)
{
	(void)unused;
	for (unsigned long n = 0; !is_over; n++) {
		if (tick(n) != n * 5 + 1)
			_exit(9);
		if (n % 64 == 0)
			usleep(100);
	}
	return 0;
}

static int call_while_the_first_lives(void *first)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != *(pid_t *)first)
		_exit(9);
	return call(NULL);
}

static void end(int number)
{
	(void)number;
	is_over = 1;
}

int main(void)
{
	int status;
	pid_t first = getpid();
	pid_t other = clone(call_while_the_first_lives, stack + sizeof stack, CLONE_VM | SIGCHLD, &first);

	signal(SIGUSR1, end);
	printf("%d\n", other);
	fflush(stdout);
	call(NULL);
	return waitpid(other, &status, 0) == other && status == 0 ? 0 : 1;
}

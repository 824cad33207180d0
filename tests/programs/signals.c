/*
 * signals COUNT: calls tick() COUNT times under a storm of SIGALRM (timer), SIGUSR1 with values (sigqueue to itself by
 * a child), and checks that each handler got the siginfo that was sent. Prints "alarms values".
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define VALUES 300

static volatile unsigned long sum;
static volatile sig_atomic_t alarms, wrong, next_value;

__attribute__((noinline, noclone)) unsigned long tick(unsigned long n)
{
	sum += n;
	return n + 1;
}

static void on_alarm(int number, siginfo_t *info, void *context)
{
	alarms++;
	if (number != SIGALRM || info->si_code != SI_KERNEL)
		wrong = 1;
}

static void on_value(int number, siginfo_t *info, void *context)
{
	if (number != SIGRTMIN || info->si_code != SI_QUEUE || info->si_value.sival_int != next_value)
		wrong = 2;
	next_value++;
}

int main(int argc, char **argv)
{
	unsigned long count = strtoul(argv[1], NULL, 0);
	struct sigaction action = { .sa_sigaction = on_alarm, .sa_flags = SA_SIGINFO | SA_RESTART };
	struct itimerval often = { { 0, 500 }, { 0, 500 } }, never = { { 0, 0 }, { 0, 0 } };
	pid_t parent = getpid(), child;
	int status;

	sigaction(SIGALRM, &action, NULL);
	action.sa_sigaction = on_value;
	sigaction(SIGRTMIN, &action, NULL);
	child = fork();
	if (child == 0) {
		for (int n = 0; n < VALUES; n++) {
			while (sigqueue(parent, SIGRTMIN, (union sigval){ .sival_int = n }))
				usleep(100);
			usleep(200);
		}
		_exit(0);
	}
	setitimer(ITIMER_REAL, &often, NULL);
	for (unsigned long n = 0; n < count || next_value < VALUES; n++)
		if (tick(n) != n + 1 || n > count * 1000)
			return 2;
		else if (n >= count)
			usleep(100), n--, sum -= n + 1;
	setitimer(ITIMER_REAL, &never, NULL);
	waitpid(child, &status, 0);
	printf("%d %d\n", (int)alarms, (int)next_value);
	return wrong ? 10 + wrong : next_value == VALUES ? 0 : 1;
}

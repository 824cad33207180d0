/*
 * heldsignals COUNT stepped|stopped: a thread calls tick() again and again, while a timer sends SIGALRM to it, and another
 * thread COUNT values with SIGRTMIN. Each handler looks whether its siginfo is what was sent. Meanwhile
 *
 * stepped: the other thread calls aside(), whose instruction keeps its address, before each value: with a probe on it the
 * first thread is stopped each time.
 * stopped: a child stops the process with SIGSTOP after each few values, and lets it go on with SIGCONT.
 *
 * Prints how many values came. Status 0 if all signals came as they were sent, else a line says what came.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile unsigned long sum;
static volatile sig_atomic_t next_value, wrong_alarm, wrong_value;
static volatile int done;
static pthread_t main_thread;
static int count, is_stepped;

__attribute__((noinline, noclone)) unsigned long tick(unsigned long n)
{
	sum += n;
	return n + 1;
}

void aside(void);
__asm__(".text\n.globl aside\n.type aside, @function\naside: fld1\nfstp %st(0)\nret\n.size aside, . - aside");

static void on_alarm(int number, siginfo_t *info, void *context)
{
	if (info->si_code != SI_KERNEL)
		wrong_alarm = info->si_code;
}

static void on_value(int number, siginfo_t *info, void *context)
{
	if (info->si_code != SI_QUEUE || info->si_value.sival_int != next_value)
		wrong_value = info->si_code;
	next_value++;
}

static void *send(void *unused)
{
	for (int n = 0; n < count; n++) {
		if (is_stepped)
			aside();
		pthread_sigqueue(main_thread, SIGRTMIN, (union sigval){ .sival_int = n });
		while (next_value < n - 4)
			usleep(100);
	}
	while (next_value < count)
		usleep(100);
	done = 1;
	return NULL;
}

static void stop_and_go(pid_t process)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (int n = 0; getppid() == process; n++) {
		kill(process, SIGSTOP);
		usleep(n % 4 * 300);
		kill(process, SIGCONT);
		usleep(700 + n % 7 * 300);
	}
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_sigaction = on_alarm, .sa_flags = SA_SIGINFO | SA_RESTART };
	struct itimerval often = { { 0, 700 }, { 0, 700 } }, never = { { 0, 0 }, { 0, 0 } };
	sigset_t both;
	pthread_t sender;
	pid_t self = getpid(), child = 0;

	count = atoi(argv[1]);
	is_stepped = !strcmp(argv[2], "stepped");
	main_thread = pthread_self();
	sigaction(SIGALRM, &action, NULL);
	action.sa_sigaction = on_value;
	sigaction(SIGRTMIN, &action, NULL);
	sigemptyset(&both);
	sigaddset(&both, SIGALRM);
	sigaddset(&both, SIGRTMIN);
	if (!is_stepped && !(child = fork())) {
		stop_and_go(self);
		_exit(0);
	}
	pthread_sigmask(SIG_BLOCK, &both, NULL);
	pthread_create(&sender, NULL, send, NULL);
	pthread_sigmask(SIG_UNBLOCK, &both, NULL);
	setitimer(ITIMER_REAL, &often, NULL);
	for (unsigned long n = 0; !done; n++)
		if (tick(n) != n + 1)
			return 2;
	setitimer(ITIMER_REAL, &never, NULL);
	pthread_join(sender, NULL);
	if (child) {
		kill(child, SIGKILL);
		waitpid(child, NULL, 0);
	}
	printf("%d\n", (int)next_value);
	if (wrong_alarm || wrong_value)
		fprintf(stderr, "si_code of a wrong SIGALRM: %d, of a wrong SIGRTMIN: %d\n", (int)wrong_alarm, (int)wrong_value);
	return wrong_alarm || wrong_value ? 1 : next_value != count;
}

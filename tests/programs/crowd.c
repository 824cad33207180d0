/*
 * crowd: 100 threads call two functions and each gets signals with values, until SIGUSR2. Status 0 if every thread is
 * still there, all results were right, and each thread got all its signals, once, in order, with what was sent.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#define COUNT 100

static struct member {
	pthread_t id;
	atomic_int sent, received;
	atomic_ulong calls;
} members[COUNT];
static __thread struct member *self;
static atomic_int over, all_sent, wrong;
static volatile unsigned long bias = 7;

__attribute__((noinline, noclone)) unsigned long stepped(unsigned long n)
{
	return bias + n;
}

__attribute__((noinline, noclone)) unsigned long emulated(unsigned long n);
__asm__(".globl emulated\n.type emulated, @function\nemulated: push %rbp\nmov %rsp, %rbp\nlea 1(%rdi), %rax\npop %rbp\n"
	"ret\n.size emulated, . - emulated");

static void on_value(int number, siginfo_t *info, void *context)
{
	if (number != SIGRTMIN || info->si_code != SI_QUEUE || info->si_value.sival_int != self->received)
		wrong = 2;
	if (emulated(number) != (unsigned long)number + 1)
		wrong = 3;
	self->received++;
}

static void on_enough(int number)
{
	over = 1;
}

static void *belong(void *argument)
{
	sigset_t values;

	self = argument;
	sigemptyset(&values);
	sigaddset(&values, SIGRTMIN);
	pthread_sigmask(SIG_UNBLOCK, &values, NULL);
	for (unsigned long n = 0; !all_sent || self->received < self->sent; n++) {
		if (stepped(n) != n + 7 || emulated(n) != n + 1)
			wrong = 1;
		self->calls++;
		if (n % 4 == 0)
			usleep(2000);
	}
	return NULL;
}

int main(void)
{
	struct sigaction action = { .sa_sigaction = on_value, .sa_flags = SA_SIGINFO | SA_RESTART };
	sigset_t values;

	sigaction(SIGRTMIN, &action, NULL);
	signal(SIGUSR2, on_enough);
	sigemptyset(&values);
	sigaddset(&values, SIGRTMIN);
	pthread_sigmask(SIG_BLOCK, &values, NULL); /* until a thread knows who it is */
	for (int n = 0; n < COUNT; n++)
		if (pthread_create(&members[n].id, NULL, belong, &members[n]))
			return 10;
	printf("ready\n");
	fflush(stdout);
	while (!over) {
		for (int n = 0; n < COUNT; n++)
			if (!pthread_sigqueue(members[n].id, SIGRTMIN, (union sigval){ .sival_int = members[n].sent }))
				members[n].sent++;
		usleep(20000);
	}
	all_sent = 1;
	for (int n = 0; n < COUNT; n++)
		if (pthread_join(members[n].id, NULL) || !members[n].calls || members[n].received != members[n].sent)
			wrong = 4;
	return wrong;
}

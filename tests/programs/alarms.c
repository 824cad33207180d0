/*
 * alarms MODE COUNT: calls step() 100 * COUNT times while SIGALRM comes again and again, and prints how often step() was
 * executed, how often SIGALRM came, and how many jumps there were. The handler of the signal calls step(), too. MODE says what
 * else it does: "plain" nothing, "stack" it has a stack of its own, "jump" it jumps away from every second interruption.
 * In the end it is calm for two seconds, and step() is called 1000 times more, with numbers from 1000000000 on.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#define OPAQUE __attribute__((noipa, used, aligned(16)))

static volatile unsigned long executed, alarms, jumps;
static volatile sig_atomic_t may_jump;
static int jumping;
static sigjmp_buf out;
static const struct itimerval soon = {{0, 0}, {0, 100}}, never;

OPAQUE unsigned long step(unsigned long n)
{
	__asm__ volatile("lock incq %0" : "+m"(executed));
	return n * 3 + 1;
}

OPAQUE unsigned long apart(unsigned long n)
{
	return n * 3;
}

OPAQUE static void on_alarm(int number)
{
	(void)number;
	alarms++;
	if (step(alarms) != alarms * 3 + 1)
		abort();
	setitimer(ITIMER_REAL, &soon, NULL);
	if (jumping && may_jump && alarms % 2) {
		jumps++;
		siglongjmp(out, 1);
	}
}

int main(int argc, char **argv)
{
	if (argc < 3)
		return 2;
	static char stack[1 << 16];
	struct sigaction action = {.sa_handler = on_alarm};
	jumping = !strcmp(argv[1], "jump");
	if (!strcmp(argv[1], "stack")) {
		stack_t own = {.ss_sp = stack, .ss_size = sizeof(stack)};
		sigaltstack(&own, NULL);
		action.sa_flags = SA_ONSTACK;
	}
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &soon, NULL);
	static volatile unsigned long n;
	unsigned long count = strtoul(argv[2], NULL, 0);
	for (n = 0; n < count; n++) {
		if (sigsetjmp(out, 1))
			continue;
		may_jump = 1;
		for (int k = 0; k < 100; k++)
			if (step(n) != n * 3 + 1)
				abort();
		may_jump = 0;
	}
	setitimer(ITIMER_REAL, &never, NULL);
	sleep(2);
	for (unsigned long k = 0; k < 1000; k++)
		step(1000000000 + k);
	printf("%lu %lu %lu\n", executed, alarms, jumps);
	return 0;
}

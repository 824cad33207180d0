/*
 * handover COUNT ITERATIONS [vfork]: COUNT threads call tick() ITERATIONS times each, the first thread calls turn() once
 * meanwhile; SIGRTMIN is counted. Prints its process id and the addresses of turn(), of a string on the stack, of a
 * variable and of allocated memory; at the end how many calls and signals there were, with status 0 if that is right.
 * With "vfork" the first call of turn() is made by a vfork child, after which the first thread calls tick(). With the
 * environment variable MEGABYTES so much memory is filled.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static atomic_ulong calls, signals;
static unsigned long iterations;
volatile unsigned long answer = 42;
char *anonymous;

__asm__(".globl turn\n.type turn, @function\n"
	"turn:\n\tmov $1234567, %eax\n\tnop\n\tret\n.size turn, .-turn\n");
unsigned long turn(const char *text);

__attribute__((noinline, noclone)) unsigned long tick(unsigned long n)
{
	unsigned long value = answer + n;
	atomic_fetch_add(&calls, 1);
	return value;
}

static void *work(void *arg)
{
	for (unsigned long n = 0; n < iterations; n++)
		tick(n);
	return arg;
}

static void on_signal(int number)
{
	(void)number;
	atomic_fetch_add(&signals, 1);
}

__attribute__((noinline, noclone)) unsigned long outer(int depth)
{
	char text[32] = "on the stack";

	if (depth)
		return outer(depth - 1) + text[0];
	printf("%d %#lx %#lx %#lx %#lx\n", (int)getpid(), (unsigned long)turn, (unsigned long)text,
	       (unsigned long)&answer, (unsigned long)anonymous);
	fflush(stdout);
	return turn(text) + text[1];
}

/* Leaves by a jump, so that its return is that of child_turns(). */
__asm__(".globl hands_on\n.type hands_on, @function\n"
	"hands_on:\n\t.cfi_startproc\n\tjmp child_turns\n\t.cfi_endproc\n.size hands_on, .-hands_on\n");
pid_t hands_on(void);

__attribute__((noinline, noclone, used)) static pid_t child_turns(void)
{
	pid_t child = vfork();

	if (!child) {
		turn("vfork child");
		_exit(0);
	}
	return child;
}

int main(int argc, char **argv)
{
	int count = atoi(argv[1]);
	pthread_t ids[64];
	struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};

	iterations = argc > 2 ? strtoul(argv[2], NULL, 0) : 0;
	sigaction(SIGRTMIN, &action, NULL);
	anonymous = calloc(1, 1 << 20);
	strcpy(anonymous + 12345, "in anonymous memory");
	if (getenv("MEGABYTES")) {
		size_t size = (size_t)atoi(getenv("MEGABYTES")) << 20;
		memset(malloc(size), 'x', size);
	}
	for (int n = 0; n < count; n++)
		if (pthread_create(&ids[n], NULL, work, NULL))
			return 2;
	if (argc > 3) {
		pid_t child = hands_on();
		if (waitpid(child, NULL, 0) != child)
			return 3;
		work(NULL);
		calls -= iterations;
	}
	unsigned long value = outer(3);
	for (int n = 0; n < count; n++)
		pthread_join(ids[n], NULL);
	printf("%lu %lu\n", (unsigned long)calls, (unsigned long)signals);
	return value == 1234567UL + 'n' + 3 * 'o' && calls == count * iterations ? 0 : 1;
}

/*
 * ondemand THREADS: does what lines on its standard input say, and answers each with how often stepped(), emulated() and
 * both() have returned so far: "call N" calls each N times, "fork N" does so in a child process, "start" lets threads call
 * them in a tight loop, "stop" waits for the end of these. stepped() begins with an instruction that has to be
 * single-stepped, emulated() with one that the kernel emulates; both() has two of the latter in a row. Ends with status 0
 * if all results were right.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static atomic_int over, wrong;
static atomic_ulong calls;
static volatile unsigned long bias = 7;

__attribute__((noinline, noclone)) unsigned long stepped(unsigned long n)
{
	return bias + n;
}

__attribute__((noinline, noclone)) unsigned long emulated(unsigned long n);
__asm__(".globl emulated\n.type emulated, @function\nemulated: push %rbp\nmov %rsp, %rbp\nlea 1(%rdi), %rax\npop %rbp\n"
	"ret\n.size emulated, . - emulated");

__attribute__((noinline, noclone)) unsigned long both(unsigned long n);
__asm__(".globl both\n.type both, @function\nboth: push %rbp\npush %rbx\nlea 2(%rdi), %rax\npop %rbx\npop %rbp\nret\n"
	".size both, . - both");

static void once(unsigned long n)
{
	if (stepped(n) != n + 7 || emulated(n) != n + 1 || both(n) != n + 2)
		wrong = 1;
}

static void *spin(void *arg)
{
	unsigned long n = 0;
	for (; !over; n++)
		once(n);
	calls += n;
	return arg;
}

int main(int argc, char **argv)
{
	int count = argc > 1 ? atoi(argv[1]) : 2;
	pthread_t ids[64];
	char line[80];

	setlinebuf(stdout);
	printf("ready\n");
	while (fgets(line, sizeof line, stdin)) {
		if (strncmp(line, "call ", 5) == 0) {
			unsigned long n = 0, end = strtoul(line + 5, NULL, 0);
			for (; n < end; n++)
				once(n);
			calls += n;
		} else if (strncmp(line, "fork ", 5) == 0) {
			unsigned long end = strtoul(line + 5, NULL, 0);
			int status;
			pid_t pid = fork();
			if (pid == 0) {
				for (unsigned long n = 0; n < end; n++)
					once(n);
				_exit(wrong);
			}
			if (waitpid(pid, &status, 0) != pid || status)
				wrong = 1;
			calls += end;
		} else if (strcmp(line, "start\n") == 0) {
			over = 0;
			for (int n = 0; n < count; n++)
				if (pthread_create(&ids[n], NULL, spin, NULL))
					return 2;
		} else if (strcmp(line, "stop\n") == 0) {
			over = 1;
			for (int n = 0; n < count; n++)
				pthread_join(ids[n], NULL);
		}
		printf("%lu\n", (unsigned long)calls);
	}
	return wrong;
}

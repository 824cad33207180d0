/*
 * orphan hot THREADS | orphan calm: calls probed functions, and lives on when the tracer dies: its SIGTRAP handler takes
 * each thread back to the breakpoint that it ran into, as soon as that is taken away from outside.
 *
 * hot: THREADS threads in a tight loop, until SIGUSR2. calm: one turn for each byte of input, answered by a line.
 * Prints at the end how many threads trapped, and the longest time in microseconds that one of them had to wait.
 * Status 0 if all results were right.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define FUNCTION(name, code) \
	".balign 32\n.globl " name "\n.type " name ", @function\n" name ": " code "\n.size " name ", . - " name "\n"

/*
 * A thread that trapped is one byte behind a site. No other place where the tracer may have put it looks like that: the
 * instructions are longer, and slots begin at multiples of 16.
 */
__asm__(".text\n"
	FUNCTION("site_emulated", "lea 1(%rdi), %rax\nret")
	FUNCTION("site_load", "mov (%rsi), %rax\nadd %rdi, %rax\nret")
	FUNCTION("site_free", "imul $7, %rdi, %rax\nret")
	FUNCTION("site_repeat", "rep movsb\nlea (%rdi), %rax\nret")
	".text\n");
unsigned long site_emulated(unsigned long n), site_load(unsigned long n, volatile unsigned long *p), site_free(unsigned long n);
char *site_repeat(char *to, const char *from, unsigned long unused, unsigned long size);

static atomic_int over, wrong, traps;
static atomic_long longest;
static volatile unsigned long bias = 7;

static long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000L + time.tv_nsec;
}

static void on_trap(int number, siginfo_t *info, void *context)
{
	greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
	volatile unsigned char *code = (unsigned char *)registers[REG_RIP] - 1;
	long start = now(), waited;

	traps++;
	if (info->si_code != SI_KERNEL || registers[REG_RIP] % 16 == 0)
		return; /* the end of a step, or the thread is in a slot already */
	if (*code != 0xcc && (unsigned long)code % 32)
		return; /* the instruction was emulated */
	while (*code == 0xcc)
		;
	registers[REG_RIP]--;
	waited = now() - start;
	for (long former = longest; waited > former;)
		if (atomic_compare_exchange_weak(&longest, &former, waited))
			break;
}

static void on_enough(int number)
{
	over = 1;
}

static void check(const char *site, unsigned long n, unsigned long result, unsigned long expected)
{
	if (result == expected)
		return;
	wrong = 1;
	fprintf(stderr, "%s(%lu) gave %#lx instead of %#lx\n", site, n, result, expected);
}

static void turn(unsigned long n)
{
	char from[40], to[40];
	unsigned long same = 0;

	check("emulated", n, site_emulated(n), n + 1);
	check("load", n, site_load(n, &bias), n + 7);
	check("free", n, site_free(n), n * 7);
	memset(from, (int)n, sizeof from);
	memset(to, (int)~n, sizeof to);
	check("repeat", n, site_repeat(to, from, 0, sizeof to) - to, sizeof to);
	while (same < sizeof to && to[same] == from[same])
		same++;
	check("copy", n, same, sizeof to);
}

static void *spin(void *argument)
{
	for (unsigned long n = 0; !over; n++)
		turn(n);
	return argument;
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_sigaction = on_trap, .sa_flags = SA_SIGINFO | SA_RESTART };
	int count = argc > 2 ? atoi(argv[2]) : 0;
	pthread_t ids[16];
	char byte;

	sigaction(SIGTRAP, &action, NULL);
	signal(SIGUSR2, on_enough);
	for (int n = 0; n < count; n++)
		pthread_create(&ids[n], NULL, spin, NULL);
	printf("ready\n");
	fflush(stdout);
	for (unsigned long n = 0; !count && read(0, &byte, 1) == 1; n++) {
		turn(n);
		printf("%d\n", traps);
		fflush(stdout);
	}
	for (int n = 0; n < count; n++)
		pthread_join(ids[n], NULL);
	printf("%d %ld\n", traps, longest / 1000);
	return wrong;
}

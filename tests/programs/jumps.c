/*
 * jumps COUNT THREADS: each thread executes an instruction at at_load COUNT times, every other time with an address that
 * may not be read; a handler of SIGSEGV jumps out of it. Prints how often it came through and how often not.
 */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

__asm__(".globl do_load\n.type do_load, @function\ndo_load: nop\n.globl at_load\n.type at_load, @function\n"
	"at_load: mov (%rdi), %rax\nret\n.size do_load, . - do_load\n");
long do_load(const long *where);

static __thread sigjmp_buf back;
static atomic_long completed, faulted;
static long count;

static void on_fault(int number)
{
	siglongjmp(back, number);
}

static void *work(void *unused)
{
	static const long good = 5;

	for (volatile long n = 0; n < count; n++)
		if (sigsetjmp(back, 1))
			faulted++;
		else if (do_load(n % 2 ? &good : (const long *)8) == 5)
			completed++;
	return unused;
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = on_fault };
	pthread_t ids[64];
	int threads = atoi(argv[2]);

	count = atol(argv[1]);
	sigaction(SIGSEGV, &action, NULL);
	for (int n = 0; n < threads; n++)
		pthread_create(&ids[n], NULL, work, NULL);
	for (int n = 0; n < threads; n++)
		pthread_join(ids[n], NULL);
	printf("%ld %ld\n", completed, faulted);
	return 0;
}

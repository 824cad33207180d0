/*
 * rivals THREADS ROUNDS: as many threads call step(THREAD, N) ROUNDS times each, all at the same time; every 4096 calls
 * rest() follows, whose first instruction looks at memory. At the end finish() is called.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static unsigned long rounds;

__attribute__((noipa)) unsigned long step(unsigned long thread, unsigned long n)
{
	return thread + n;
}

unsigned long rest(unsigned long *sum, unsigned long thread);
__asm__(".globl rest\n.type rest, @function\nrest:\tfnop\n\tmov (%rdi), %rax\n\tadd %rsi, %rax\n\tret\n.size rest, . - rest\n");

__attribute__((noipa)) void finish(const char *text)
{
	puts(text);
}

static void *work(void *argument)
{
	unsigned long thread = (unsigned long)argument, sum = 0;
	for (unsigned long n = 0; n < rounds; n++) {
		sum += step(thread, n);
		if (n % 4096 == 0)
			sum ^= rest(&sum, thread);
	}
	return (void *)sum;
}

int main(int argc, char **argv)
{
	unsigned long threads = argc > 1 ? strtoul(argv[1], NULL, 0) : 1;
	pthread_t ids[64];
	rounds = argc > 2 ? strtoul(argv[2], NULL, 0) : 1000;
	for (unsigned long n = 0; n < threads; n++)
		if (pthread_create(&ids[n], NULL, work, (void *)n))
			return 1;
	for (unsigned long n = 0; n < threads; n++)
		pthread_join(ids[n], NULL);
	finish("done");
	return 0;
}

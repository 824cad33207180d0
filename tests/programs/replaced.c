/*
 * Eight threads call work(), and check each result: it must be that of the original or of the patch. A timer
 * interrupts them, so that signal handlers return into the code that a patch replaces. At the end of its input the
 * program prints the numbers of results: original, patched, and wrong. A line of input makes it print single results;
 * "e" makes it execute itself anew.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#define THREADS 8

static volatile int ending;
static volatile long interrupted;
static unsigned long counts[THREADS][3 * 8]; /* a cache line each */
static volatile long table_size = 1000;
char word[16] = "word";

/* The copy of table_size of another part of the program is in named_twice.c. */
extern long other_part(void);

__attribute__((noinline, noclone)) long work(long x)
{
	return 3 * x + table_size;
}

__attribute__((noinline, noclone)) static long hidden(long x)
{
	return x ^ 5;
}

extern inline __attribute__((always_inline)) long spread(long x)
{
	return 7 * x + 1;
}

__attribute__((noinline, noclone)) long uses_spread(long x)
{
	return spread(x) + 22;
}

__attribute__((noinline, noclone)) size_t length(const char *text)
{
	return strlen(text);
}

/* A function that is chosen at run time, and never called. */
__attribute__((noinline)) long plain_choice(long x)
{
	return x;
}

static long (*choose(void))(long)
{
	return plain_choice;
}

__attribute__((ifunc("choose"))) long chosen(long x);

/* A function of one byte, and the next one right after it. */
__asm__(".text\n.globl tiny\n.type tiny, @function\ntiny: ret\n.size tiny, 1\n"
	".type next_to_tiny, @function\nnext_to_tiny: xor %eax, %eax\nret\n.size next_to_tiny, 3\n");

/* A function that is shorter than a jump, and the padding after it. */
__asm__(".p2align 4\n.globl padded\n.type padded, @function\npadded: xor %eax, %eax\nret\n.size padded, 3\n.p2align 4\n");

__attribute__((noinline, noclone)) char *next_line(char *line, int size)
{
	char *found = fgets(line, size, stdin);
	__asm__ volatile("" ::: "memory");
	return found;
}

static void on_alarm(int number)
{
	for (int i = 0; i < 50; i++)
		interrupted += number;
}

static void *check(void *place)
{
	unsigned long *count = place;
	for (long x = 0; !ending; x++) {
		long result = work(x);
		count[result == 3 * x + 1000 ? 0 : result == 3 * x + 1000 + 1000000 ? 1 : 2]++;
		if (hidden(x) != (x ^ 5))
			count[2]++;
	}
	return NULL;
}

int main(void)
{
	pthread_t threads[THREADS];
	struct itimerval often = {{0, 500}, {0, 500}};
	char line[64];
	signal(SIGPROF, on_alarm);
	setitimer(ITIMER_PROF, &often, NULL);
	for (int i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, check, counts[i]);
	printf("ready\n");
	fflush(stdout);
	while (next_line(line, sizeof line)) {
		if (line[0] == 'e') {
			signal(SIGPROF, SIG_IGN); /* the new program begins without a handler */
			execl("/proc/self/exe", "replaced", NULL);
		}
		printf("%ld %ld %zu\n", work(1), uses_spread(1) + other_part(), length(word));
		fflush(stdout);
	}
	ending = 1;
	unsigned long sums[3] = {0};
	for (int i = 0; i < THREADS; i++) {
		pthread_join(threads[i], NULL);
		for (int j = 0; j < 3; j++)
			sums[j] += counts[i][j];
	}
	printf("%lu %lu %lu\n", sums[0], sums[1], sums[2]);
	return sums[2] != 0;
}

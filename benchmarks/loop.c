/*
 * loop COUNT           the paper's loop (dec, nop, jnz), COUNT times
 * loop COUNT calls     calls of a function, COUNT times
 * loop COUNT deep      the same, from 16 functions that have called each other: with those that called main, and called
 *                      itself, a stack of 20 or 21 frames
 * loop COUNT several   calls of it and of two others, in an order that does not repeat soon
 * loop SECONDS armed   calls of the function until its code is another one, and a call as slow as a probe makes it, or the
 *                      seconds have passed: on a busy machine all calls may become slow for a while
 *
 * All but the last one print nanoseconds per iteration, measured in here, so that nobody's start-up counts: those of all (LOOP)
 * and those of the fastest tenth in a row (BEST), which other work on the machine disturbs less. The last one prints
 * the time of CLOCK_MONOTONIC in nanoseconds (ARMED), and goes on to be there until its standard input ends.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

__asm__(".text\n"
	".globl run_loop\n"
	".type run_loop, @function\n"
	"run_loop:\n\t"
	"mov %edi, %eax\n"
	".globl loop\n"
	"loop:\n\t"
	"dec %eax\n\t"
	"nop\n\t"
	"jnz loop\n\t"
	"ret\n"
	".size run_loop, . - run_loop\n");

void run_loop(int count);

#define FUNCTION(name) \
	__asm__(".globl " #name "\n" \
		".type " #name ", @function\n" \
		#name ":\n\t" \
		"push %rbp\n\t" \
		"mov %rsp, %rbp\n\t" \
		"mov %rdi, %rax\n\t" \
		"pop %rbp\n\t" \
		"ret\n" \
		".size " #name ", . - " #name "\n"); \
	long name(long n, const char *text, long three, long four)

FUNCTION(called);
FUNCTION(second);
FUNCTION(third);

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

/* A call without a probe takes a nanosecond, with reading the clock some fifty; a probe costs several hundred. */
static const char text[] = "a string of thirty characters.";

enum { BATCHES = 10, SLOW = 250, SLOW_IN_A_ROW = 500 };

static __attribute__((noinline)) int call_from(int depth, int count)
{
	if (depth)
		return call_from(depth - 1, count) + 1;
	for (int i = 0; i < count; i++)
		called(i, text, 3, 4);
	return 0;
}

static void call_several(int count)
{
	static const char *const texts[] = { "GET /index.html", "POST /a/longer/path", "HEAD /", "" };
	unsigned random = 1;

	for (int i = 0; i < count; i++) {
		random = random * 1103515245 + 12345;
		switch ((random >> 16) % 3) {
		case 0:
			called(i, texts[i & 3], 3, 4);
			break;
		case 1:
			second(i, texts[i & 3], 3, 4);
			break;
		default:
			third(i, texts[i & 3], 3, 4);
		}
	}
}

/* Where its return is probed, the first byte of a function may be what it was. */
static int is_changed(const unsigned char *unprobed, int size)
{
	const volatile unsigned char *code = (const volatile unsigned char *)called;

	for (int i = 0; i < size; i++)
		if (code[i] != unprobed[i])
			return 1;
	return 0;
}

static int wait_for_probe(double seconds)
{
	unsigned char unprobed[9];	/* the size of FUNCTION */
	double start = now(), first = start;
	int slow = 0;

	memcpy(unprobed, (const void *)called, sizeof(unprobed));
	while (slow < SLOW_IN_A_ROW) {
		double before = now();
		called(0, text, 3, 4);
		if (now() - before < SLOW || !is_changed(unprobed, sizeof(unprobed)))
			slow = 0;
		else if (slow++ == 0)
			first = before;
		if (before - start > seconds * 1e9)
			return 1;
	}
	fprintf(stderr, "ARMED %.0f\n", first);
	while (getchar() != EOF)
		;
	return 0;
}

int main(int argc, char **argv)
{
	int count = argc > 1 ? atoi(argv[1]) : 1000;
	int batch = count > BATCHES ? count / BATCHES : 1;
	double start = now(), best = 1e18;

	if (argc > 2 && strcmp(argv[2], "armed") == 0)
		return wait_for_probe(count);
	for (int done = 0; done < count; done += batch) {
		double before = now();
		int n = count - done < batch ? count - done : batch;
		if (argc > 2 && strcmp(argv[2], "several") == 0)
			call_several(n);
		else if (argc > 2)
			call_from(strcmp(argv[2], "deep") ? 0 : 15, n);
		else
			run_loop(n);
		if ((now() - before) / n < best)
			best = (now() - before) / n;
	}
	fprintf(stderr, "LOOP %.1f\nBEST %.2f\n", (now() - start) / count, best);
	return 0;
}

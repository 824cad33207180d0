/*
 * returns THREADS ROUNDS: leaves functions in every way that C has, in each of THREADS threads, and prints for each
 * function how often it really returned, and the sum of what it returned.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define OPAQUE __attribute__((noipa, used))
#define FUNCTIONS(F) \
	F(factorial) F(leaf) F(branches) F(jumper) F(tail) F(tail_indirect) F(tail_maybe) F(tail_jumper) F(even) F(odd) \
	F(partly) F(structure) F(table_of) F(forked)

enum {
#define F(name) N_##name,
	FUNCTIONS(F)
#undef F
	COUNT
};

static const char *const names[] = {
#define F(name) #name,
	FUNCTIONS(F)
#undef F
};
static long counts[COUNT];
static unsigned sums[COUNT];
static int rounds;

struct big {
	int values[10];
};

static int returned(int function, int value)
{
	__atomic_add_fetch(&counts[function], 1, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&sums[function], (unsigned)value, __ATOMIC_SEQ_CST);
	return value;
}
#define CALL(name, ...) returned(N_##name, name(__VA_ARGS__))

OPAQUE int factorial(int n)
{
	return n < 2 ? 1 : n * CALL(factorial, n - 1);
}

OPAQUE int leaf(int n)
{
	return n + 3;
}

OPAQUE int branches(int n)
{
	if (n % 3 == 0)
		return 7;
	if (n % 3 == 1) {
		int sum = 0;
		for (int k = 0; k < n % 11; k++)
			sum += CALL(leaf, k);
		return sum;
	}
	return CALL(leaf, n) * 2;
}

OPAQUE int jumper(jmp_buf *where, int n)
{
	if (n & 1)
		longjmp(*where, n);
	return n / 2;
}

/* These leave by a jump; who is jumped to is counted as well. */
OPAQUE int tail(int n)
{
	returned(N_leaf, n * 2 + 3);
	return leaf(n * 2);
}

OPAQUE int minus(int n)
{
	return -n;
}

static int (*volatile chosen[2])(int) = { leaf, minus };

OPAQUE int tail_indirect(int n)
{
	if (!(n & 1))
		returned(N_leaf, n + 3);
	return chosen[n & 1](n);
}

OPAQUE int tail_maybe(int n)
{
	if (n & 4)
		return 1;
	returned(N_leaf, n + 3);
	return leaf(n);
}

OPAQUE int tail_jumper(jmp_buf *where, int n)
{
	if (!(n & 1))
		returned(N_jumper, n / 2);
	return jumper(where, n);
}

int even(int n);

OPAQUE int odd(int n)
{
	returned(N_odd, n & 1);
	return n ? even(n - 1) : 0;
}

OPAQUE int even(int n)
{
	returned(N_even, !(n & 1));
	return n ? odd(n - 1) : 1;
}

extern void complain(int) __attribute__((cold));

OPAQUE void complain(int n)
{
	rounds += n & 0;
}

OPAQUE int partly(int n)
{
	char text[64];

	memset(text, n, sizeof(text));
	if (__builtin_expect(n % 5 == 4, 0)) {
		complain(text[3]);
		complain(text[n % 60]);
		return text[7] + 100;
	}
	return text[n % 64];
}

OPAQUE struct big structure_of(int n)
{
	struct big b = { { n, n + 1 } };
	return b;
}

OPAQUE struct big structure_tail(int n)
{
	return structure_of(n + 1);
}

static int structure(int n)
{
	return structure_tail(n).values[1];
}

OPAQUE int table_of(int n)
{
	switch (n % 9) {
	case 0: return 11 * n;
	case 1: return leaf(n) * (0 * returned(N_leaf, n + 3) + 1);
	case 2: return 13;
	case 3: return n ^ 5;
	case 4: return n << 2;
	case 5: return n * n;
	case 6: return n - 77;
	case 7: return 99;
	default: return -1;
	}
}

OPAQUE int forker(int n)
{
	int child = fork();

	if (child == 0)
		return n + 1000;
	waitpid(child, NULL, 0);
	return n;
}

OPAQUE int forked(int n)
{
	return forker(n);
}

OPAQUE __attribute__((noreturn)) void die(int status)
{
	fflush(stdout);
	exit(status);
}

static void *run(void *unused)
{
	(void)unused;
	for (volatile int n = 0; n < rounds; n++) {
		jmp_buf where;

		CALL(factorial, n % 8);
		CALL(branches, n);
		if (!setjmp(where))
			CALL(jumper, &where, n);
		CALL(tail, n);
		CALL(tail_indirect, n);
		CALL(tail_maybe, n);
		if (!setjmp(where))
			CALL(tail_jumper, &where, n);
		even(n % 7);
		CALL(partly, n);
		CALL(structure, n);
		CALL(table_of, n);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	int count = atoi(argv[1]);
	pthread_t threads[64];

	rounds = argc > 2 ? atoi(argv[2]) : 10;
	for (int n = 0; n < count; n++)
		pthread_create(&threads[n], NULL, run, NULL);
	for (int n = 0; n < count; n++)
		pthread_join(threads[n], NULL);
	/* The child's return is counted by the tracer only: its memory is a copy. */
	int value = forked(5);
	if (value > 1000)
		_exit(0);
	returned(N_forked, value);
	returned(N_forked, value + 1000);
	for (int n = 0; n < COUNT; n++)
		printf("%s %ld %u\n", names[n], counts[n], sums[n]);
	die(0);
}

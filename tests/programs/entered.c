/*
 * entered THREADS ROUNDS: calls functions in each of THREADS threads, and prints of each call that returned
 *
 *     NAME TID ARGUMENT RESULT NANOSECONDS
 *
 * in the order of the returns of a thread, where the time is measured around the call. With TAILS functions are left by
 * tail calls, also to themselves; with STACKS by longjmp, and by coroutines, which return on other threads or never.
 * "wait" says "waiting" in nested calls, and goes on at each line of its input; "deep" makes very deep tail calls first.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define OPAQUE __attribute__((noipa, used))

static int rounds;

static long now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000L + t.tv_nsec;
}

static long note(const char *name, long argument, long result, long began)
{
	long took = now() - began;
	char line[128];
	int size = snprintf(line, sizeof line, "%s %d %ld %ld %ld\n", name, gettid(), argument, result, took);
	if (write(1, line, size) != size)
		_exit(9);
	return result;
}

#define CALL(name, n, ...) ({ long began_ = now(); note(#name, n, name(n, ##__VA_ARGS__), began_); })

OPAQUE long leaf(long n)
{
	return n + 3;
}

OPAQUE long factorial(long n)
{
	return n < 2 ? 1 : n * CALL(factorial, n - 1);
}

OPAQUE long slow(long milliseconds)
{
	usleep(milliseconds * 1000);
	return milliseconds + 1;
}

#ifdef TAILS
OPAQUE long odd(long n);

OPAQUE long even(long n)
{
	return n ? odd(n - 1) : 1;
}

OPAQUE long odd(long n)
{
	return n ? even(n - 1) : 0;
}

OPAQUE long tail(long n)
{
	return n & 1 ? slow(n) : leaf(2 * n);
}

OPAQUE long twice(long n)
{
	return tail(CALL(tail, n) & 7);
}

static void tails(int round)
{
	CALL(tail, round);
	CALL(twice, round);
	CALL(even, round);
	CALL(odd, 2 * round + 1);
	CALL(even, 40);
}
#endif

#ifdef STACKS
static _Thread_local jmp_buf out;

OPAQUE long jumper(long n)
{
	if (n & 1)
		longjmp(out, 1);
	return n;
}

OPAQUE long thrower(long n, long depth)
{
	return (depth ? CALL(thrower, n, depth - 1) : CALL(jumper, n)) + 1;
}

static void jumps(int round)
{
	for (long n = 0; n < 4; n++) {
		if (!setjmp(out))
			CALL(thrower, n, round & 3);
		CALL(jumper, 2 * n);
	}
}

struct coroutine {
	ucontext_t own, back;
	char stack[1 << 16];
};

OPAQUE long passed(long n, struct coroutine *on)
{
	if (on)
		swapcontext(&on->own, &on->back);
	__asm__ volatile("");
	return n * 2;
}

static void body(unsigned low, unsigned high, int n)
{
	struct coroutine *on = (struct coroutine *)((unsigned long)high << 32 | low);
	CALL(passed, n, on);
	CALL(passed, n + 1, on);
	swapcontext(&on->own, &on->back);
	CALL(passed, n + 2, on); /* never gets back from here */
}

static void *resume(void *arg)
{
	struct coroutine *on = arg;
	swapcontext(&on->back, &on->own);
	return NULL;
}

static void coroutines(int round)
{
	struct coroutine *each = calloc(3, sizeof *each);
	for (int n = 0; n < 3; n++) {
		getcontext(&each[n].own);
		each[n].own.uc_stack.ss_sp = each[n].stack;
		each[n].own.uc_stack.ss_size = sizeof each[n].stack;
		makecontext(&each[n].own, (void (*)(void))body, 3, (unsigned)(unsigned long)&each[n],
			    (unsigned)((unsigned long)&each[n] >> 32), 100 * round + 10 * n);
		swapcontext(&each[n].back, &each[n].own);
	}
	CALL(passed, round, NULL);
	for (int n = 2; n >= 0; n--) {
		pthread_t id;
		resume(&each[n]);
		pthread_create(&id, NULL, resume, &each[n]);
		pthread_join(id, NULL);
		resume(&each[n]);
	}
	/* The stacks are used again, by calls that return at once and by others, at the same places. */
	free(each);
}
#endif

/* The child returns from what its parent has entered: nobody has seen it enter. */
OPAQUE long forked(long n)
{
	int status;
	pid_t child = fork();
	if (!child)
		return n + 1;
	waitpid(child, &status, 0);
	return status ? -1 : n;
}

OPAQUE long waiting(long n)
{
	char line[2];
	if (n)
		return CALL(waiting, n - 1) + 1;
	if (!fgets(line, sizeof line, stdin))
		_exit(8);
	return 0;
}

static void *work(void *arg)
{
	for (int round = 0; round < rounds; round++) {
		CALL(leaf, round);
		CALL(factorial, round % 7);
		CALL(slow, round & 3);
#ifdef TAILS
		tails(round);
#endif
#ifdef STACKS
		jumps(round);
		coroutines(round);
#endif
	}
	return arg;
}

int main(int argc, char **argv)
{
	int count = atoi(argv[1]);
	pthread_t ids[64];

	rounds = atoi(argv[2]);
	if (argc > 3 && !strcmp(argv[3], "wait")) {
		puts("waiting");
		fflush(stdout);
		CALL(waiting, 5); /* both at the same frames */
		CALL(waiting, 5);
		return 0;
	}
#ifdef TAILS
	if (argc > 3 && !strcmp(argv[3], "deep"))
		CALL(even, 200);
#endif
	for (int n = 0; n < count; n++)
		if (pthread_create(&ids[n], NULL, work, NULL))
			return 2;
	for (int n = 0; n < count; n++)
		pthread_join(ids[n], NULL);
	for (int n = 0; n < 2; n++) {
		pid_t own = getpid();
		long result = CALL(forked, 10 * n);
		if (getpid() != own) {
			CALL(leaf, result); /* at frames that its parent has used */
			_exit(0);
		}
	}
	if (argc > 3)
		return 0;
	if (!vfork()) {
		execl("/proc/self/exe", "entered", "1", "1", "again", NULL);
		_exit(2);
	}
	wait(NULL);
	return 0;
}

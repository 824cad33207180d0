/*
 * stackwork: for each line of input, call here() from recursion, qsort(), signal handlers on both stacks, below an
 * exception, in threads and on a stack made by makecontext(), and print a line. No frame has a frame pointer.
 */
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <pthread.h>
#include <ucontext.h>

#define OPAQUE extern "C" __attribute__((noipa, used, aligned(16)))

static int other_stack[1 << 14];
static ucontext_t outside, inside;

OPAQUE int here(long depth)
{
	return depth * 3 + 1;
}

OPAQUE int down(int depth)
{
	volatile char room[300];
	room[depth & 127] = depth;
	return (depth ? down(depth - 1) : here(depth)) + room[depth & 127];
}

OPAQUE int vast(int depth)
{
	volatile char room[9000];
	room[depth] = depth;
	return (depth ? vast(depth - 1) : here(depth)) + room[depth];
}

struct Leaving {
	~Leaving() { here(2); }
};

OPAQUE void throwing(int depth)
{
	Leaving leaving;
	if (!depth)
		throw 3;
	throwing(depth - 1);
}

OPAQUE int compare(const void *left, const void *right)
{
	here(-1);
	return *(const int *)left - *(const int *)right;
}

OPAQUE void handle(int number)
{
	down(number % 7);
}

OPAQUE void *work(void *depth)
{
	for (int n = 0; n < 50; n++)
		down(*(int *)depth);
	return nullptr;
}

OPAQUE void apart(void)
{
	down(3);
}

int main()
{
	char line[16];
	int depths[2] = {9, 4};
	stack_t alternate = {};
	struct sigaction action = {};

	alternate.ss_sp = malloc(65536);
	alternate.ss_size = 65536;
	action.sa_handler = handle;
	action.sa_flags = SA_ONSTACK;
	setvbuf(stdout, nullptr, _IOLBF, 0);
	sigaltstack(&alternate, nullptr);
	signal(SIGUSR1, handle);
	sigaction(SIGUSR2, &action, nullptr);
	puts("ready");
	while (fgets(line, sizeof(line), stdin)) {
		int numbers[5] = {3, 1, 2, 5, 4};
		pthread_t threads[2];
		for (int n = 0; n < 60; n++)
			down(n);
		vast(8);
		qsort(numbers, 5, sizeof(*numbers), compare);
		raise(SIGUSR1);
		raise(SIGUSR2);
		try {
			throwing(2);
		} catch (int) {
			here(0);
		}
		for (int n = 0; n < 2; n++)
			pthread_create(&threads[n], nullptr, work, &depths[n]);
		for (int n = 0; n < 2; n++)
			pthread_join(threads[n], nullptr);
		getcontext(&inside);
		inside.uc_stack.ss_sp = other_stack;
		inside.uc_stack.ss_size = sizeof(other_stack);
		inside.uc_link = &outside;
		makecontext(&inside, apart, 0);
		swapcontext(&outside, &inside);
		puts("done");
	}
	return 0;
}

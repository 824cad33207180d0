/*
 * unwound COUNT: in each of four threads, and on a stack of its own made by makecontext(), calls thrown() COUNT times,
 * which returns for even numbers, and is left by an exception for odd ones; between, it calls itself with half of the
 * number. Prints how often it was called, how often it returned, and the sum of the arguments of the calls that did.
 */
#include <cstdio>
#include <cstdlib>
#include <pthread.h>
#include <ucontext.h>

#define OPAQUE extern "C" __attribute__((noipa, used, aligned(16)))

static unsigned long calls, returns, sum;
static unsigned long count;

OPAQUE unsigned long thrown(unsigned long n)
{
	unsigned long half = 0;
	__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
	if (n > 1) {
		try {
			half = thrown(n / 2);
		} catch (unsigned long) {
			half = 1;
		}
	}
	if (n & 1)
		throw n;
	__atomic_add_fetch(&returns, 1, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&sum, n, __ATOMIC_SEQ_CST);
	return half + n;
}

OPAQUE unsigned long apart(unsigned long n)
{
	return n * 3;
}

static void *work(void *)
{
	for (unsigned long n = 0; n < count; n++) {
		try {
			thrown(n);
		} catch (unsigned long) {
		}
	}
	return nullptr;
}

static ucontext_t first, second;

static void aside()
{
	for (unsigned long n = 0; n < count; n++) {
		try {
			thrown(n);
		} catch (unsigned long) {
		}
		swapcontext(&second, &first);
	}
}

int main(int argc, char **argv)
{
	count = argc > 1 ? std::strtoul(argv[1], nullptr, 0) : 100;
	pthread_t threads[4];
	for (auto &thread : threads)
		pthread_create(&thread, nullptr, work, nullptr);
	static char stack[1 << 16];
	getcontext(&second);
	second.uc_stack.ss_sp = stack;
	second.uc_stack.ss_size = sizeof(stack);
	second.uc_link = &first;
	makecontext(&second, aside, 0);
	for (unsigned long n = 0; n < count; n++)
		swapcontext(&first, &second);
	for (auto &thread : threads)
		pthread_join(thread, nullptr);
	std::printf("%lu %lu %lu\n", calls, returns, sum);
	return 0;
}

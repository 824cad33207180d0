/*
 * throws THREADS ROUNDS: leaves functions by return, by tail call and by exception, with and without destructors on the
 * way, in each of THREADS threads; prints for each function how often it really returned, and the sum of its values.
 */
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#define OPAQUE extern "C" __attribute__((noipa, used))

static std::atomic<long> counts[4];
static std::atomic<unsigned> sums[4];
static std::atomic<int> destroyed;
static const char *const names[] = { "thrower", "hands_over", "cleans_up", "nested" };

static int returned(int function, int value)
{
	counts[function]++;
	sums[function] += (unsigned)value;
	return value;
}

struct Guard {
	~Guard() { destroyed++; }
};

OPAQUE int thrower(int n)
{
	if (n % 3 == 2)
		throw n;
	return n + 1;
}

/* A tail call: what it jumps to may throw. */
OPAQUE int hands_over(int n)
{
	if (n % 3 != 2)
		returned(0, n + 1);
	return thrower(n);
}

OPAQUE int cleans_up(int n)
{
	Guard guard;

	return returned(1, hands_over(n)) * 2;
}

OPAQUE int nested(int depth, int n)
{
	if (depth == 0)
		return returned(2, cleans_up(n));
	try {
		return returned(3, nested(depth - 1, n)) + depth;
	} catch (int caught) {
		if (depth < 3)
			throw;
		return -caught;
	}
}

int main(int argc, char **argv)
{
	std::vector<std::thread> threads;
	int rounds = argc > 2 ? atoi(argv[2]) : 10;

	for (int n = 0; n < atoi(argv[1]); n++)
		threads.emplace_back([=] {
			for (int k = 0; k < rounds; k++)
				returned(3, nested(4, k));
		});
	for (auto &thread : threads)
		thread.join();
	for (int n = 0; n < 4; n++)
		printf("%s %ld %u\n", names[n], counts[n].load(), sums[n].load());
	return destroyed.load() == atoi(argv[1]) * rounds ? 0 : 1;
}

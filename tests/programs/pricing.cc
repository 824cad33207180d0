/*
 * Eight threads call price(), which throws for numbers above 100, when a line of input arrives: all at once, so that
 * their first calls of a patch coincide. The program prints the sum of the results for 5, that for 500, and the number
 * of Guards that exist, which is not 0 if an exception has passed one without its destructor.
 */
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
#include <atomic>
#include <stdexcept>

static const int threads = 8;
static std::atomic<int> guards;
static pthread_barrier_t begin, end;
static int results[2][threads];

struct Guard {
	Guard() { guards++; }
	~Guard() { guards--; }
};

extern "C" __attribute__((noinline)) int price(int n, double factor)
{
	if (n > 100)
		throw std::runtime_error("too many");
	return n * factor;
}

static __attribute__((noinline)) int ask(int n)
{
	try {
		Guard guard;
		return price(n, 2.0);
	} catch (const std::runtime_error &) {
		return -1;
	}
}

static void *work(void *place)
{
	long number = (long)place;
	for (;;) {
		pthread_barrier_wait(&begin);
		results[0][number] = ask(5);
		results[1][number] = ask(500);
		pthread_barrier_wait(&end);
	}
	return NULL;
}

int main()
{
	char line[9];
	pthread_barrier_init(&begin, NULL, threads + 1);
	pthread_barrier_init(&end, NULL, threads + 1);
	for (long i = 0; i < threads; i++) {
		pthread_t thread;
		pthread_create(&thread, NULL, work, (void *)i);
	}
	do {
		int sums[2] = {0, 0};
		pthread_barrier_wait(&begin);
		pthread_barrier_wait(&end);
		for (int i = 0; i < threads; i++) {
			sums[0] += results[0][i];
			sums[1] += results[1][i];
		}
		printf("%d %d %d\n", sums[0], sums[1], guards.load());
		fflush(stdout);
	} while (fgets(line, sizeof line, stdin));
	_exit(0);
}

/* entered: as entered.c, and functions are left by exceptions. */
#include <cstdio>
#include <ctime>
#include <unistd.h>

#define OPAQUE extern "C" __attribute__((noipa, used))

static long now()
{
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000L + t.tv_nsec;
}

static long note(const char *name, long argument, long result, long began)
{
	long took = now() - began;
	std::printf("%s %d %ld %ld %ld\n", name, gettid(), argument, result, took);
	return result;
}

#define CALL(name, n) ({ long began_ = now(); note(#name, n, name(n), began_); })

OPAQUE long thrower(long n)
{
	if (n % 3 == 2)
		throw n;
	return n;
}

OPAQUE long middle(long n)
{
	return CALL(thrower, n) + 1;
}

OPAQUE long catcher(long n)
{
	try {
		return CALL(middle, n) + 1;
	} catch (long thrown) {
		return -thrown;
	}
}

int main(int, char **)
{
	for (long n = 0; n < 50; n++)
		CALL(catcher, n);
	return 0;
}

/* requests COUNT: calls three functions in turns, with numbers that grow and strings of various lengths */
#include <stdlib.h>

__attribute__((noinline)) long accepted(long n)
{
	__asm__ volatile("" ::: "memory");
	return n;
}

__attribute__((noinline)) long parsed(long n, const char *text)
{
	__asm__ volatile("" :: "r"(text) : "memory");
	return n;
}

__attribute__((noinline)) long answered(long n, long status, long size)
{
	__asm__ volatile("" :: "r"(status), "r"(size) : "memory");
	return n;
}

int main(int argc, char **argv)
{
	static const char *const texts[] = { "GET /", "POST /long/path", "", "HEAD /index.html", "GET /x" };
	long count = argc > 1 ? atol(argv[1]) : 10;

	for (long n = 0; n < count; n++) {
		if (n % 3 == 0)
			accepted(n);
		parsed(n, texts[n % 5]);
		if (n % 7)
			answered(n, 200 + n % 2, n * n);
	}
	return 0;
}

/*
 * seek COUNT    system calls that come to a function of the kernel each (null_lseek), COUNT times
 *
 * Prints the nanoseconds of one, of the fastest tenth in a row, which other work on the machine disturbs least.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { BATCHES = 10 };

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

int main(int argc, char **argv)
{
	int file = open("/dev/null", O_RDONLY), count = argc > 1 ? atoi(argv[1]) / BATCHES : 0;
	double best = 1e18;

	if (file < 0 || count < 1)
		return 1;
	for (int batch = 0; batch < BATCHES; batch++) {
		double before = now(), each;

		for (int n = 0; n < count; n++)
			lseek(file, 0, SEEK_SET);
		each = (now() - before) / count;
		if (each < best)
			best = each;
	}
	printf("%f\n", best);
	return 0;
}

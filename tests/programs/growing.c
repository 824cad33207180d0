/*
 * Lets its heap grow by as many MiB as the first argument says, one by one, and prints how many it got. With a second
 * argument it recurses first until its stack has as many MiB.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MIB = 1 << 20 };

__attribute__((noinline)) unsigned long called(unsigned long n)
{
	return n * 5 + 1;
}

__attribute__((noinline)) unsigned long deeper(unsigned long mib)
{
	volatile char room[MIB];

	room[0] = 1;
	return mib > 1 ? deeper(mib - 1) + room[0] : 1;
}

int main(int argc, char **argv)
{
	unsigned long wanted = strtoul(argv[1], NULL, 0), got = 0, stack = 0;
	char *begin = sbrk(0);

	if (argc > 2)
		stack = deeper(strtoul(argv[2], NULL, 0));
	for (; got < wanted; got++) {
		char *place = sbrk(MIB);

		if (place != begin + got * MIB)
			break;
		*place = (char)called(got);
	}
	printf("%lu MiB of heap, %lu MiB of stack\n", got, stack);
	return 0;
}

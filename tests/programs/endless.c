/*
 * Calls spot() until its standard input ends, with a pause of so many microseconds before each call (0: none), and
 * prints how often. It begins with a nop.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

void spot(void);
__asm__(".text\n.type spot, @function\n.globl spot\nspot: nop\nret\n.size spot, .-spot\n");

enum { CALLS_BETWEEN_LOOKS = 1024 };

int main(int argc, char **argv)
{
	unsigned long calls = 0, pause = argc > 1 ? strtoul(argv[1], NULL, 0) : 0;
	struct timespec time = { pause / 1000000, pause % 1000000 * 1000 };
	struct pollfd input = { .fd = 0, .events = POLLIN };

	while (pause || poll(&input, 1, 0) == 0) {
		for (int n = 0; n < (pause ? 1 : CALLS_BETWEEN_LOOKS); n++, calls++)
			spot();
		if (pause && poll(&input, 1, 0) != 0)
			break;
		if (pause)
			nanosleep(&time, NULL);
	}
	printf("%lu\n", calls);
	return 0;
}

/* undumpable: forbids that others look into it, prints "ready", and calls tick() every millisecond. */
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>

static volatile unsigned long sum;

__attribute__((noinline, noclone)) void tick(unsigned long n)
{
	sum += n;
}

int main(void)
{
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
		return 1;
	printf("ready\n");
	fflush(stdout);
	for (unsigned long n = 0;; n++) {
		tick(n);
		usleep(1000);
	}
}

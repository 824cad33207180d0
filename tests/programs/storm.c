/*
 * storm COUNT WIDTH: COUNT times, up to WIDTH at a time, starts a child that calls tick(N) and starts a child of its own,
 * which does the same and executes this program again, with 0 0. At its end each calls tick(COUNT). Status 0 if all
 * children ended well.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile unsigned long sum;

__attribute__((noinline, noclone)) unsigned long tick(unsigned long n)
{
	sum += n;
	return n + 1;
}

static int wait_for_one(void)
{
	int status;
	return wait(&status) > 0 && status == 0;
}

static int child(const char *self, int n)
{
	tick(n);
	if (!fork()) {
		tick(n);
		execl(self, self, "0", "0", NULL);
		return 9;
	}
	return wait_for_one() ? 0 : 8;
}

int main(int argc, char **argv)
{
	int count = atoi(argv[1]), width = atoi(argv[2]), living = 0;

	for (int n = 0; n < count; n++) {
		if (living == width) {
			if (!wait_for_one())
				return 1;
			living--;
		}
		if (!fork())
			_exit(child(argv[0], n));
		living++;
	}
	for (; living; living--)
		if (!wait_for_one())
			return 1;
	tick(count);
	return 0;
}

/* handled COUNT [MICROSECONDS]: hands requests of a structure to a function, with a pause behind each */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct request {
	int id;
	unsigned char flag;
	struct request *next;
	char name[16];
	long size;
};

long total;

__attribute__((noinline)) long handle(struct request *request, int n)
{
	total += request->id * n;
	return total;
}

int main(int argc, char **argv)
{
	struct request first = { 7, 1, NULL, "first", 100 }, second = { 9, 0, &first, "second", 200 };
	int count = argc > 1 ? atoi(argv[1]) : 4;

	for (int n = 0; n < count; n++) {
		handle(n & 1 ? &second : &first, n);
		if (argc > 2)
			usleep(atoi(argv[2]));
	}
	printf("%ld\n", total);
	return 0;
}

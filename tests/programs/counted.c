/*
 * counted PAGES NAPS: write to each of PAGES new pages by the instruction at `at_write`, sleep NAPS times, and print what
 * getrusage(2) counts of it: the minor page faults of the writes, and the context switches within and around the calls of
 * `begin` and `end`.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

enum { PAGE = 4096 };

__asm__(".globl write_to\n.type write_to, @function\nwrite_to: nop\n"
	".globl at_write\nat_write: movb $1, (%rdi)\nret\n.size write_to, . - write_to\n");
void write_to(char *where);

__attribute__((noinline, noclone)) void begin(void)
{
	__asm__ volatile("" : : : "memory");
}

__attribute__((noinline, noclone)) void end(void)
{
	__asm__ volatile("" : : : "memory");
}

static struct rusage now(void)
{
	struct rusage usage;
	getrusage(RUSAGE_THREAD, &usage);
	return usage;
}

static long switches(struct rusage first, struct rusage last)
{
	return last.ru_nvcsw + last.ru_nivcsw - first.ru_nvcsw - first.ru_nivcsw;
}

int main(int argc, char **argv)
{
	long pages = atol(argv[1]), naps = atol(argv[2]);
	struct timespec nap = {0, 100000};
	char *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct rusage times[6];

	(void)argc;
	madvise(memory, pages * PAGE, MADV_NOHUGEPAGE);
	for (int n = 0; n < 6; n++)
		times[n] = now();
	times[0] = now();
	for (long n = 0; n < pages; n++)
		write_to(memory + n * PAGE);
	times[1] = now();

	times[2] = now();
	begin();
	times[3] = now();
	for (long n = 0; n < naps; n++)
		nanosleep(&nap, NULL);
	times[4] = now();
	end();
	times[5] = now();

	printf("%ld %ld %ld\n", times[1].ru_minflt - times[0].ru_minflt, switches(times[3], times[4]),
	       switches(times[2], times[5]));
	return 0;
}

/*
 * A library (-shared -DLIBRARY) with functions of three kinds, and a program that calls them on demand: for each line
 * "NAME COUNT" on standard input it calls NAME that often and prints the sum of what was returned. Threads: with
 * "NAME COUNT THREADS" as many threads do that at once.
 */
#ifdef LIBRARY

#define FUNCTION(name, factor) \
	__attribute__((noinline, noclone)) unsigned long name(unsigned long n) \
	{ \
		__asm__ volatile("" ::: "memory"); \
		return n * factor + 1; \
	}

FUNCTION(start_process, 3)
FUNCTION(allocate_memory, 5)
FUNCTION(release_memory, 6)
FUNCTION(write_file, 7)
FUNCTION(handle_fault, 11)

#else

#include <pthread.h>
#include <stdio.h>
#include <string.h>

typedef unsigned long function(unsigned long);

extern function start_process, allocate_memory, release_memory, write_file, handle_fault;

static const struct {
	const char *name;
	function *function;
	unsigned long factor;
} functions[] = {
	{ "start_process", start_process, 3 },
	{ "allocate_memory", allocate_memory, 5 },
	{ "release_memory", release_memory, 6 },
	{ "write_file", write_file, 7 },
	{ "handle_fault", handle_fault, 11 },
};

static unsigned long count, chosen;

static void *call(void *wrong)
{
	for (unsigned long n = 0; n < count; n++)
		if (functions[chosen].function(n) != n * functions[chosen].factor + 1)
			*(int *)wrong = 1;
	return NULL;
}

int main(void)
{
	char name[64];
	char line[256];
	int wrong = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	while (fgets(line, sizeof line, stdin)) {
		unsigned long threads = 1;
		pthread_t ids[16];
		if (sscanf(line, "%63s %lu %lu", name, &count, &threads) < 2 || threads > 16)
			return 2;
		for (chosen = 0; chosen < sizeof functions / sizeof *functions; chosen++)
			if (!strcmp(functions[chosen].name, name))
				break;
		if (chosen == sizeof functions / sizeof *functions)
			return 2;
		for (unsigned long n = 0; n < threads; n++)
			pthread_create(&ids[n], NULL, call, &wrong);
		for (unsigned long n = 0; n < threads; n++)
			pthread_join(ids[n], NULL);
		printf("%lu\n", count * threads);
	}
	return wrong;
}

#endif

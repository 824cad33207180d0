/*
 * remapped MODE [COUNT]: write COUNT times to `object` and as often to its neighbour, change the mapping of their page in the
 * way that MODE names, and write again. Prints the writes that a watchpoint sees: those to `object`, and those to its neighbour.
 * Ends with status 0 if all memory has the content that the program expects.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096
#define WRITERS 4

struct page {
	volatile unsigned long object[8];
	volatile unsigned long neighbour;
	volatile unsigned long parts[WRITERS];
	unsigned char rest[PAGE - (9 + WRITERS) * sizeof(unsigned long)];
};

/* The watched page is the second one; other threads write to the fourth one. */
struct page area[5] __attribute__((aligned(PAGE)));

static unsigned long count = 1;
static unsigned long hits, others;
static atomic_int ended;

static void fail(int status)
{
	fprintf(stderr, "failed: %d\n", status);
	_exit(status);
}

__attribute__((noinline)) static void use(struct page *page)
{
	unsigned long object = page->object[3], neighbour = page->neighbour;

	for (unsigned long n = 0; n < count; n++) {
		page->object[3]++;
		page->neighbour++;
	}
	if (page->object[3] != object + count || page->neighbour != neighbour + count)
		fail(10);
}

static void use_watched(void)
{
	use(&area[1]);
	hits += count;
	others += count;
}

static void *map(void *place, unsigned long pages, int flags)
{
	void *found = mmap(place, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);

	if (found == MAP_FAILED)
		fail(11);
	return found;
}

static void wait_for(pid_t pid)
{
	int status = 0;

	if (waitpid(pid, &status, 0) != pid || status)
		fail(12);
}

static void change(const char *mode, char **argv)
{
	struct page *other = map(NULL, 4, 0);

	if (!strcmp(mode, "munmap")) {
		if (munmap(&area[1], PAGE))
			fail(20);
		use(map(&area[1], 1, MAP_FIXED));
	} else if (!strcmp(mode, "neighbours")) { /* the page itself stays */
		if (munmap(&area[0], PAGE) || munmap(&area[2], PAGE))
			fail(21);
		use_watched();
	} else if (!strcmp(mode, "over")) {
		use(map(&area[1], 1, MAP_FIXED));
	} else if (!strcmp(mode, "mremap")) {
		if (mremap(&area[1], PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, other) != other)
			fail(22);
		if (other->object[3] != count)
			fail(23);
		use(other);
		use(map(&area[1], 1, MAP_FIXED));
	} else if (!strcmp(mode, "arrival")) { /* memory from elsewhere takes its place */
		use(other);
		if (mremap(other, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, &area[1]) != &area[1])
			fail(24);
		if (area[1].object[3] != count)
			fail(25);
		use(&area[1]);
	} else if (!strcmp(mode, "dontneed")) {
		if (madvise(&area[1], PAGE, MADV_DONTNEED))
			fail(26);
		if (area[1].object[3] || area[1].neighbour)
			fail(27);
		use_watched();
	} else if (!strcmp(mode, "readonly")) {
		if (mprotect(&area[1], PAGE, PROT_READ) || mprotect(&area[1], PAGE, PROT_READ | PROT_WRITE))
			fail(28);
		use_watched();
	} else if (!strcmp(mode, "vfork")) {
		pid_t pid = vfork();

		if (!pid) {
			use(&area[1]);
			_exit(0);
		}
		wait_for(pid);
		hits += count;
		others += count;
		use_watched();
		if (area[1].object[3] != 3 * count)
			fail(29);
	} else if (!strcmp(mode, "exec")) {
		char number[32];

		snprintf(number, sizeof(number), "%lu", count);
		execl("/proc/self/exe", argv[0], "none", number, NULL);
		fail(30);
	} else if (!strcmp(mode, "core")) {
		struct rlimit limit = { RLIM_INFINITY, RLIM_INFINITY };

		for (unsigned long n = 0; n < sizeof(area[1].rest); n++)
			area[1].rest[n] = n * 7;
		printf("%p %lu\n", (void *)&area[1], count);
		fflush(stdout);
		setrlimit(RLIMIT_CORE, &limit);
		abort();
	} else if (!strcmp(mode, "none")) {
		hits += count; /* those before the exec */
		others += count;
	} else {
		fail(1);
	}
}

static void *write_on(void *arg)
{
	volatile unsigned long *part = arg;

	while (!ended)
		++*part;
	return NULL;
}

/* Threads write to `object` and to its page while the process forks and changes its other mappings. */
static void all_at_once(void)
{
	pthread_t ids[WRITERS];

	for (int n = 0; n < WRITERS; n++)
		if (pthread_create(&ids[n], NULL, write_on, (void *)&area[1].parts[n]))
			fail(40);
	for (unsigned long n = 0; n < count; n++) {
		struct page *other = map(NULL, 2, 0);
		unsigned long seen = area[1].parts[n % WRITERS];
		pid_t pid = fork();

		if (!pid) {
			area[1].object[3]++;
			_exit(area[1].parts[n % WRITERS] >= seen ? 0 : 41);
		}
		wait_for(pid);
		area[1].object[3]++;
		area[3].object[0]++;
		if (madvise(&area[3], PAGE, MADV_DONTNEED) || area[3].object[0])
			fail(42);
		other->object[0] = n;
		if (mremap(&area[4], PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, other) != other || munmap(other, 2 * PAGE))
			fail(43);
		map(&area[4], 1, MAP_FIXED);
	}
	ended = 1;
	for (int n = 0; n < WRITERS; n++)
		pthread_join(ids[n], NULL);
	if (area[1].object[3] != count)
		fail(44);
	printf("%lu\n", 2 * count);
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "none";

	if (argc > 2)
		count = strtoul(argv[2], NULL, 0);
	if (!strcmp(mode, "all")) {
		all_at_once();
		return 0;
	}
	use_watched();
	change(mode, argv);
	printf("%lu %lu\n", hits, others);
	return 0;
}

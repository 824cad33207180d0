/*
 * protected MODE [COUNT [THREADS]]: write to objects that share a page, and to `object` among them, in the way that MODE names. Print
 * the numbers of writes that touch `object` and of those that do not. Ends with status 0 if the sums are right.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096

struct page {
	unsigned char before[1000];
	volatile unsigned char object[100];
	volatile unsigned long neighbour;
	volatile unsigned long total;
	unsigned char after[PAGE - 1000 - 104 - 2 * sizeof(unsigned long)];
};

/* In the file, so that the page is a private mapping of it. */
struct page shared __attribute__((aligned(PAGE))) = { .before = { 1 } };
/* Not in the file: anonymous memory. */
unsigned char area[8 * PAGE] __attribute__((aligned(PAGE)));

static unsigned long count = 1;
static int zero = -1;
static atomic_ulong filled;

static void fail(int status)
{
	fprintf(stderr, "failed: %d\n", status);
	exit(status);
}

__attribute__((noinline)) void touch(unsigned n)
{
	shared.object[n % sizeof(shared.object)] = n;
}

__attribute__((noinline)) void miss(void)
{
	__atomic_fetch_add(&shared.neighbour, 1, __ATOMIC_SEQ_CST);
}

static void *work(void *arg)
{
	for (unsigned long n = 0; n < count; n++) {
		touch(n);
		miss();
		if (arg && read(zero, (void *)(shared.object + 10), 20) == 20)
			filled++;
	}
	return NULL;
}

static void threads(int number, int reads)
{
	pthread_t ids[64];

	for (int n = 0; n < number; n++)
		if (pthread_create(&ids[n], NULL, work, reads ? &reads : NULL))
			fail(2);
	for (int n = 0; n < number; n++)
		pthread_join(ids[n], NULL);
	if (shared.neighbour != count * number || (reads && filled != count * number))
		fail(3);
	if (shared.before[0] != 1)
		fail(4);
	printf("%lu %lu %lu\n", count * number, count * number, (unsigned long)filled);
}

static void family(int number)
{
	for (int n = 0; n < number; n++) {
		int status = 0;
		pid_t pid = fork();

		if (!pid) {
			work(NULL);
			_exit(shared.neighbour == count ? 0 : 5);
		}
		if (waitpid(pid, &status, 0) != pid || status)
			fail(6);
	}
	printf("%lu %lu 0\n", count * number, count * number);
}

static volatile sig_atomic_t ended;
static atomic_ulong done;
static int is_hit;

static void end(int number)
{
	ended = number;
}

static void *work_on(void *arg)
{
	unsigned long mine = 0;

	for (; !ended; mine++) {
		if (is_hit)
			touch(mine);
		miss();
		if (is_hit && read(zero, (void *)(shared.object + 10), 20) != 20)
			fail(7);
	}
	atomic_fetch_add(&done, mine);
	return arg;
}

/* Write until SIGUSR1 arrives; to the object only with `hits`. */
static void endless(int number, int hits)
{
	pthread_t ids[64];

	is_hit = hits;
	signal(SIGUSR1, end);
	for (int n = 0; n < number; n++)
		if (pthread_create(&ids[n], NULL, work_on, NULL))
			fail(2);
	puts("ready");
	fflush(stdout);
	while (!ended)
		usleep(1000);
	for (int n = 0; n < number; n++)
		pthread_join(ids[n], NULL);
	if (shared.neighbour != done || shared.before[0] != 1)
		fail(3);
	puts("right");
}

/* Write pseudo-random pieces of `area`: the test computes the same. */
static void pieces(unsigned long number)
{
	unsigned long state = 12345;

	for (unsigned long n = 0; n < number; n++) {
		state = state * 6364136223846793005UL + 1442695040888963407UL;
		unsigned long place = (state >> 33) % (sizeof(area) - 8);
		unsigned char *to = area + place;
		switch (n % 4) {
		case 0:
			*(volatile unsigned char *)to = n;
			break;
		case 1:
			*(volatile unsigned short *)to = n;
			break;
		case 2:
			*(volatile unsigned int *)to = n;
			break;
		default:
			*(volatile unsigned long *)to = n;
		}
	}
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "threads";
	int number = argc > 3 ? atoi(argv[3]) : 1;

	if (argc > 2)
		count = strtoul(argv[2], NULL, 0);
	zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);
	if (!strcmp(mode, "threads"))
		threads(number, 0);
	else if (!strcmp(mode, "reads"))
		threads(number, 1);
	else if (!strcmp(mode, "fork"))
		family(number);
	else if (!strcmp(mode, "endless"))
		endless(number, 1);
	else if (!strcmp(mode, "beside"))
		endless(number, 0);
	else if (!strcmp(mode, "pieces"))
		pieces(count);
	else
		return 1;
	return 0;
}

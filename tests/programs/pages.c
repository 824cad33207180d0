/*
 * pages: calls look() with addresses in pages of all kinds, and prints for each what the kernel says when it is asked to
 * read from there (0: could be read, 1: not), and to write there what was read.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

static volatile long seen;
static int channel[2];

__attribute__((noinline, noclone)) void look(void *where)
{
	seen += (long)where;
}

static void try(const char *what, void *where)
{
	char byte;
	int readable, writable = 0;

	look(where);
	readable = write(channel[1], where, 1) == 1;
	if (readable) {
		writable = read(channel[0], where, 1) == 1;
		if (!writable && read(channel[0], &byte, 1) != 1)
			_exit(1);
	}
	printf("%s %d %d\n", what, !readable, !writable);
}

int main(void)
{
	long page = 4096;
	char *p = mmap(NULL, 6 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	FILE *file = tmpfile();
	char *shared;

	if (pipe(channel) || ftruncate(fileno(file), page / 2))
		return 1;
	shared = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
	p[0] = p[page] = p[2 * page] = 1;
	mprotect(p, page, PROT_NONE);
	mprotect(p + page, page, PROT_READ);
	munmap(p + 5 * page, page);
	try("none", p);
	try("r--", p + page);
	try("rw-", p + 2 * page);
	try("untouched", p + 3 * page + 100);
	try("last", p + 5 * page - 1);
	try("behind", p + 5 * page);
	try("file", shared + page - 1);
	try("file-beyond", shared + page);
	try("file-r--", mmap(NULL, page, PROT_READ, MAP_SHARED, fileno(file), 0));
	try("code", (void *)look);
	try("null", NULL);
	try("kernel", (void *)0xffffffff81000000);
	try("huge", (void *)-1);
	return 0;
}

/*
 * cold FILE: calls look() with an address in each page of FILE, which is mapped and was not touched, again and again for
 * each line of input; before that, these pages and the code of look() are thrown out of memory. Prints, before it waits
 * for input and after each turn, how many of the pages of FILE and of look() are in memory.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif
#define PAGE 4096

static volatile long seen;

/* A page of its own, with the instruction at two_pages lying in it and in the next one. */
__asm__(".section .text.cold, \"ax\", @progbits\n.balign 4096\n"
	".globl look\n.type look, @function\nlook: push %rbp\nmov %rsp, %rbp\n"
	"jmp two_pages\n.size look, . - look\n"
	".org look + 4093\n"
	".globl two_pages\n.type two_pages, @function\ntwo_pages: mov $1, %eax\npop %rbp\nret\n.size two_pages, . - two_pages\n"
	".balign 4096\n.text\n");
long look(const char *where);

static int file;

static int resident(const void *where, size_t size)
{
	unsigned char there[64];
	int count = 0;

	if (mincore((void *)where, size, there))
		exit(2);
	for (size_t n = 0; n < size / PAGE; n++)
		count += there[n] & 1;
	return count;
}

int main(int argc, char **argv)
{
	struct stat status;
	char line[16];
	int own = open(argv[0], O_RDONLY);

	file = open(argv[1], O_RDONLY);
	if (argc < 2 || own < 0 || file < 0 || fstat(file, &status))
		return 1;
	const char *map = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
	do {
		/* The kernel keeps what it is just working on. */
		for (int n = 0; n < 100 && (!n || resident(map, status.st_size) || resident(look, 2 * PAGE)); n++) {
			usleep(n ? 1000 : 0);
			madvise((void *)map, status.st_size, MADV_PAGEOUT);
			madvise(look, 2 * PAGE, MADV_PAGEOUT);
			posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
			posix_fadvise(own, 0, 0, POSIX_FADV_DONTNEED);
		}
		printf("%d %d\n", resident(map, status.st_size), resident(look, 2 * PAGE));
		fflush(stdout);
		if (!fgets(line, sizeof line, stdin))
			return 0;
		for (long n = 0; n < status.st_size; n += PAGE)
			seen += look(map + n + 100);
	} while (1);
}

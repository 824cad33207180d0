/*
 * memory: look() gets a string that lies across two pages, one that ends at the end of its page, an unreadable address,
 * and the address of code that carries a breakpoint. Prints the four addresses.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static volatile long seen;

__attribute__((noinline, noclone)) void look(const char *what)
{
	seen += (long)what;
}

int main(void)
{
	char *pages = mmap(NULL, 4 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *across = pages + 4096 - 5, *last = pages + 2 * 4096 - 6;

	memcpy(across, "across pages", 13);
	memcpy(last, "ending", 6);
	mprotect(pages + 2 * 4096, 4096, PROT_NONE);
	look(across);
	look(last);
	look(pages + 2 * 4096 - 3);
	look((char *)look);
	printf("%lu %lu\n", (unsigned long)pages, (unsigned long)look);
	return 0;
}

/*
 * silentargs: exchange a page of the first argument, which is as long as several pages, and call stepped() and shown()
 * for that page 10 times for each byte of standard input; then say so. The second argument says what is there then: the
 * name of a file; "userfault", memory that nobody ever delivers, which asks for the rights of root, to be another user
 * afterwards. With "fresh" a page elsewhere takes its place that was not touched yet, with "threads" the same in a process
 * with two threads.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NOBODY 65534

__attribute__((noinline, noclone)) unsigned long stepped(unsigned long n)
{
	__asm__ volatile("nop; nop; nop; nop; nop");
	return n + 1;
}

__attribute__((noinline, noclone)) const char *shown(const char *text)
{
	__asm__ volatile("nop; nop; nop; nop; nop" : "+r"(text));
	return text;
}

static void *idle(void *nothing)
{
	for (;;)
		pause();
	return nothing;
}

static int await_server(char *page)
{
	struct uffdio_register asked = {{(unsigned long)page, 4096}, UFFDIO_REGISTER_MODE_MISSING, 0};
	struct uffdio_api api = {UFFD_API, 0, 0};
	long server = syscall(SYS_userfaultfd, 0);

	return server < 0 || ioctl(server, UFFDIO_API, &api) || ioctl(server, UFFDIO_REGISTER, &asked) ||
	       setresgid(NOBODY, NOBODY, NOBODY) || setresuid(NOBODY, NOBODY, NOBODY);
}

int main(int argc, char **argv)
{
	char *page = (char *)(((unsigned long)argv[0] + 4095) & ~4095ul), byte;
	const char *kind = argc > 1 ? argv[1] : "";
	int file = *kind == '/' ? open(kind, O_RDONLY) : -1;
	pthread_t other;

	if (*kind == '/' && file < 0)
		return 1;
	if (!strcmp(kind, "fresh") || !strcmp(kind, "threads"))
		page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	else if (mmap(page, 4096, PROT_READ, MAP_PRIVATE | MAP_FIXED | (file < 0 ? MAP_ANONYMOUS : 0), file, 0) != page)
		return 1;
	if (!strcmp(kind, "userfault") && await_server(page))
		return 1;
	if (!strcmp(kind, "threads") && pthread_create(&other, NULL, idle, NULL))
		return 1;
	puts("ready");
	fflush(stdout);
	while (read(0, &byte, 1) == 1) {
		for (unsigned long n = 0; n < 10; n++)
			if (stepped(n) != n + 1 || shown(page) != page)
				abort();
		puts("called");
		fflush(stdout);
	}
	return 0;
}

/*
 * touch FILE THREADS: each thread reads from each page of FILE, of which none is in memory, and then writes to as many
 * pages of new memory, each time by one instruction, at_read and at_write. Prints how many page faults that took.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096

__asm__(".globl do_read\n.type do_read, @function\ndo_read: nop\n.globl at_read\n.type at_read, @function\n"
	"at_read: mov (%rdi), %rax\nret\n.size do_read, . - do_read\n"
	".globl do_write\n.type do_write, @function\ndo_write: nop\n.globl at_write\n.type at_write, @function\n"
	"at_write: mov %rdi, (%rdi)\nret\n.size do_write, . - do_write\n");
long do_read(const char *where);
void do_write(char *where);

static const char *path;

static void *work(void *right)
{
	struct stat status;
	int file = open(path, O_RDONLY);

	if (file < 0 || fstat(file, &status))
		return NULL;
	const char *map = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
	char *memory = mmap(NULL, status.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	madvise((void *)map, status.st_size, MADV_RANDOM);
	for (long n = 0; n < status.st_size; n += PAGE)
		if ((do_read(map + n) & 0xff) != (n / PAGE & 0xff))
			return NULL;
	for (long n = 0; n < status.st_size; n += PAGE) {
		do_write(memory + n);
		if (*(char **)(memory + n) != memory + n)
			return NULL;
	}
	return right;
}

int main(int argc, char **argv)
{
	pthread_t ids[64];
	struct rusage usage;
	int count = atoi(argv[2]), right = 0;
	void *result;

	path = argv[1];
	for (int n = 0; n < count; n++)
		pthread_create(&ids[n], NULL, work, &right);
	for (int n = 0; n < count; n++) {
		pthread_join(ids[n], &result);
		right += result != NULL;
	}
	getrusage(RUSAGE_SELF, &usage);
	printf("%ld\n", usage.ru_minflt + usage.ru_majflt);
	return right != count;
}

/*
 * manymaps COUNT [changes]: map the page with the code of stepped() so many times more, and say how many there are. A
 * byte of standard input says what to do, and is said when it is done: x: call the function 10 times; f: call it 10
 * times where it is mapped first of these; l: map it once more, and load and unload a library.
 *
 * With "changes" one thread goes on to map pages anew, and another one to load and unload the library.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

extern char __executable_start;
static char *maps[65536];
static int file, count;
static off_t offset;

__attribute__((noinline, noclone, aligned(4096))) unsigned long stepped(unsigned long n)
{
	__asm__ volatile("nop; nop; nop; nop; nop");
	return n + 1;
}

/* Where the function is in the file: the code of a program is mapped as it stands there. */
static off_t place(void)
{
	unsigned long start, end, offset, address = (unsigned long)stepped;
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];

	while (fgets(line, sizeof line, maps))
		if (sscanf(line, "%lx-%lx %*s %lx", &start, &end, &offset) == 3 && start <= address && address < end) {
			fclose(maps);
			return (off_t)(address - start + offset);
		}
	abort();
}

static char *map(char *address)
{
	return mmap(address, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | (address ? MAP_FIXED : 0), file, offset);
}

static void load(void)
{
	void *library = dlopen("libm.so.6", RTLD_NOW);

	if (library)
		dlclose(library);
}

static void *mapping(void *unused)
{
	for (unsigned long n = 1;; n = n * 6364136223846793005 + 1442695040888963407)
		map(maps[(n >> 33) % count]);
	return unused;
}

static void *loading(void *unused)
{
	for (;; usleep(100))
		load();
	return unused;
}

int main(int argc, char **argv)
{
	int wanted = argc > 1 ? atoi(argv[1]) : 0;
	char byte;
	pthread_t thread;

	file = open("/proc/self/exe", O_RDONLY);
	offset = place();
	while (count < wanted && (maps[count] = map(NULL)) != MAP_FAILED)
		count++;
	if (argc > 2) {
		pthread_create(&thread, NULL, mapping, NULL);
		pthread_create(&thread, NULL, loading, NULL);
	}
	printf("%d\n", count);
	fflush(stdout);
	while (read(0, &byte, 1) == 1) {
		unsigned long (*function)(unsigned long) = stepped;

		if (byte == 'f')
			function = (unsigned long (*)(unsigned long))maps[0];
		if (byte == 'l') {
			map(NULL);
			load();
		}
		for (unsigned long n = 0; byte != 'l' && n < 10; n++)
			if (function(n) != n + 1)
				abort();
		printf("%c\n", byte);
		fflush(stdout);
	}
	return 0;
}

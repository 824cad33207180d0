/*
 * loader LIBRARY ROUNDS: loads LIBRARY, calls plugin_call(1) three times, unloads it, and puts a mapping in its place so
 * that it comes to another address the next time. Prints the number of different addresses.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

int main(int argc, char **argv)
{
	int rounds = atoi(argv[2]), addresses = 0;
	void *last = NULL;

	for (int n = 0; n < rounds; n++) {
		void *library = dlopen(argv[1], RTLD_NOW);
		if (!library)
			return 2;
		int (*call)(int) = (int (*)(int))dlsym(library, "plugin_call");
		for (int k = 1; k <= 3; k++)
			if (call(1) != 100 + k)
				return 3;
		addresses += (void *)call != last;
		last = (void *)call;
		dlclose(library);
		if (n % 2 == 0)
			mmap((void *)((unsigned long)last & -4096UL), 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	}
	printf("%d\n", addresses);
	return 0;
}

/*
 * early_children LIBRARY OFFSET: loads LIBRARY in a thread, and makes children meanwhile, each of which calls what is at
 * OFFSET of it three times if it is mapped: the loader may not be done with it. Prints how many calls there were.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile int done;

static void *load(void *path)
{
	if (!dlopen(path, RTLD_NOW))
		abort();
	done = 1;
	return NULL;
}

static int (*find(const char *path, unsigned long offset))(int)
{
	static char text[1 << 16];
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long start, end, from;
	char rights[5], name[4096], *found = NULL;

	while (maps && !found && fgets(text, sizeof text, maps))
		if (sscanf(text, "%lx-%lx %4s %lx %*s %*s %4095s", &start, &end, rights, &from, name) == 5 && rights[2] == 'x' &&
		    !strcmp(name, path) && from <= offset && offset < from + end - start)
			found = (char *)start + offset - from;
	return (int (*)(int))found;
}

int main(int argc, char **argv)
{
	pthread_t thread;
	int calls = 0, status, last = 0;

	(void)argc;
	pthread_create(&thread, NULL, load, argv[1]);
	while (!last) {
		last = done;
		pid_t child = fork();
		if (!child) {
			int (*call)(int) = find(argv[1], strtoul(argv[2], NULL, 0));
			for (int n = 0; call && n < 3; n++)
				call(1);
			_exit(call ? 3 : 0);
		}
		waitpid(child, &status, 0);
		calls += WEXITSTATUS(status);
	}
	pthread_join(thread, NULL);
	printf("%d\n", calls);
	return 0;
}

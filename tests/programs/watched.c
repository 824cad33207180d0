/*
 * watched MODE [COUNT [THREADS [SECONDS]]]: access `cell` in the way that MODE names, each access by one instruction, and print
 * how many writes and reads there were. Ends with status 0 if the sums are right.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

volatile unsigned long cell __attribute__((aligned(16)));
volatile unsigned char bytes[32] __attribute__((aligned(32)));
static volatile unsigned long sum, traps;
static unsigned long count = 1;
static atomic_ulong writes, reads;

__attribute__((noinline, noclone)) void put(unsigned long n)
{
	cell = n;
}

__attribute__((noinline, noclone)) unsigned long get(void)
{
	return cell;
}

static void *work(void *arg)
{
	for (unsigned long n = 0; n < count; n++) {
		put(n);
		atomic_fetch_add(&writes, 1);
		if (get() < count)
			atomic_fetch_add(&reads, 1);
	}
	return arg;
}

static void threads(int number)
{
	pthread_t ids[64];

	for (int n = 0; n < number; n++)
		if (pthread_create(&ids[n], NULL, work, NULL))
			exit(2);
	for (int n = 0; n < number; n++)
		pthread_join(ids[n], NULL);
}

static void await(pid_t pid)
{
	int status = 0;

	if (waitpid(pid, &status, 0) != pid || status)
		exit(3);
}

static void family(char *self, const char *mode)
{
	char *arguments[] = { self, "put", NULL };

	for (unsigned long n = 0; n < count; n++) {
		pid_t pid = 0;

		if (!strcmp(mode, "fork")) {
			pid = fork();
			if (!pid) {
				put(n);
				_exit(0);
			}
		} else if (!strcmp(mode, "vfork")) {
			pid = vfork();
			if (!pid) {
				cell = n;
				_exit(0);
			}
		} else if (!strcmp(mode, "spawn")) {
			if (posix_spawn(&pid, self, NULL, NULL, arguments, environ))
				exit(2);
		} else {
			pid = fork();
			if (!pid) {
				execv(self, arguments);
				_exit(4);
			}
		}
		await(pid);
		writes++;
	}
}

static void on_trap(int number)
{
	traps += number == SIGTRAP;
}

static void on_alarm(int number)
{
	(void)number;
	cell++;
}

int main(int argc, char **argv)
{
	const char *mode = argv[1];

	if (argc > 2)
		count = strtoul(argv[2], NULL, 0);
	if (!strcmp(mode, "threads")) {
		threads(atoi(argv[3]));
	} else if (!strcmp(mode, "short")) {
		unsigned long rounds = count;

		count = 1;
		for (unsigned long n = 0; n < rounds; n++)
			threads(atoi(argv[3]));
	} else if (!strcmp(mode, "fork") || !strcmp(mode, "vfork") || !strcmp(mode, "spawn") || !strcmp(mode, "exec")) {
		family(argv[0], mode);
	} else if (!strcmp(mode, "put")) {
		put(1);
		writes = 1;
	} else if (!strcmp(mode, "parts")) {
		/* Each of the bytes once, then all of them in wider pieces. */
		for (int n = 0; n < 32; n++)
			bytes[n] = n;
		for (int n = 0; n < 32; n += 8)
			*(volatile unsigned long *)(bytes + n) = n;
	} else if (!strcmp(mode, "string")) {
		static char source[32];
		volatile unsigned char *to = bytes;
		const char *from = source;
		unsigned long left = 32;

		__asm__ volatile("copy: rep movsb" : "+D"(to), "+S"(from), "+c"(left) : : "memory");
	} else if (!strcmp(mode, "kernel")) {
		int zero = open("/dev/zero", O_RDONLY), null = open("/dev/null", O_WRONLY);

		for (unsigned long n = 0; n < count; n++)
			if (read(zero, (void *)&cell, sizeof cell) != sizeof cell ||
			    write(null, (void *)&cell, sizeof cell) != sizeof cell)
				return 3;
	} else if (!strcmp(mode, "signals")) {
		signal(SIGTRAP, on_trap);
		signal(SIGALRM, on_alarm);
		for (unsigned long n = 0; n < count; n++) {
			raise(SIGTRAP);
			raise(SIGALRM);
			writes++;
		}
		if (traps != count || cell != count)
			return 1;
		struct sigaction action;
		sigaction(SIGTRAP, NULL, &action);
		if (action.sa_handler != on_trap)
			return 4;
		__asm__ volatile("int3");
		if (traps != count + 1)
			return 5;
#ifdef __x86_64__
	} else if (!strcmp(mode, "stack")) {
		/* An instruction that is emulated, or stepped, writes to the watched place. */
		for (unsigned long n = 0; n < count; n++) {
			__asm__ volatile("mov %%rsp, %%rbx\n"
					 "lea 8+cell(%%rip), %%rsp\n"
					 ".globl pushing\npushing: push %%rax\n"
					 ".globl popping\npopping: pop %%rcx\n"
					 "mov %%rbx, %%rsp"
					 : : "a"(n) : "rbx", "rcx", "memory");
			writes++;
			reads++;
		}
		if (cell != count - 1)
			return 1;
#endif
	} else if (!strcmp(mode, "library")) {
		for (int n = 0; n < 3; n++) {
			void *library = dlopen(argv[3], RTLD_NOW);
			unsigned long (*call)(unsigned long) = (unsigned long (*)(unsigned long))dlsym(library, "plugin_call");

			for (unsigned long i = 0; i < count; i++)
				sum += call(i);
			dlclose(library);
			writes += count;
		}
	} else if (!strcmp(mode, "wait")) {
		/* Accesses only when told so: one byte on standard input for each. */
		char told;

		printf("ready %p\n", (void *)&cell);
		fflush(stdout);
		while (read(0, &told, 1) == 1) {
			put(++writes);
			printf("done\n");
			fflush(stdout);
		}
	} else if (!strcmp(mode, "spin")) {
		struct timespec now, start;
		pthread_t id;

		printf("ready\n");
		fflush(stdout);
		clock_gettime(CLOCK_MONOTONIC, &start);
		do {
			pid_t pid = fork();

			if (!pid) {
				put(1);
				_exit(0);
			}
			threads(atoi(argv[3]));
			if (pthread_create(&id, NULL, work, NULL))
				return 2;
			pthread_join(id, NULL);
			await(pid);
			clock_gettime(CLOCK_MONOTONIC, &now);
		} while (now.tv_sec - start.tv_sec + (now.tv_nsec - start.tv_nsec) / 1e9 < atof(argv[4]));
	} else {
		return 2;
	}
	printf("%lu %lu\n", (unsigned long)writes, (unsigned long)reads);
	return 0;
}

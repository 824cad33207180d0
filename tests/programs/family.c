/*
 * family WAY DEPTH: calls tick(DEPTH) and makes a child in the given way, which does the same with DEPTH - 1, down to 0.
 * WAY is fork, vfork, spawn, system, exec, thread-exec, clone-vm or all.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static volatile unsigned long sum;
static char *self;
static char next[16];

__attribute__((noinline, noclone)) unsigned long tick(unsigned long n)
{
	sum += n;
	return n + 1;
}

static int wait_for(pid_t pid)
{
	int status;
	return pid > 0 && waitpid(pid, &status, __WALL) == pid && status == 0 ? 0 : 1;
}

static void *execute(void *way)
{
	execl(self, self, way, next, NULL);
	_exit(9);
}

static int in_shared_memory(void *depth)
{
	tick(*(int *)depth);
	return 0;
}

static int go(const char *way, int depth)
{
	char line[4096], *arguments[] = { self, (char *)way, next, NULL };
	pid_t pid;
	pthread_t thread;

	sprintf(next, "%d", depth - 1);
	if (!strcmp(way, "fork")) {
		if (!(pid = fork())) {
			tick(depth - 1);
			_exit(0);
		}
		return wait_for(pid);
	}
	if (!strcmp(way, "vfork")) {
		if (!(pid = vfork())) {
			tick(100);
			execv(self, arguments);
			_exit(9);
		}
		return wait_for(pid);
	}
	if (!strcmp(way, "spawn"))
		return posix_spawn(&pid, self, NULL, NULL, arguments, environ) || wait_for(pid);
	if (!strcmp(way, "system")) {
		snprintf(line, sizeof line, "'%s' %s %s", self, way, next);
		return system(line);
	}
	if (!strcmp(way, "clone-vm")) {
		static char stack[65536] __attribute__((aligned(16)));
		static int argument;
		argument = depth - 1;
		return wait_for(clone(in_shared_memory, stack + sizeof stack, CLONE_VM | SIGCHLD, &argument));
	}
	if (!strcmp(way, "exec"))
		execute((void *)way);
	if (!strcmp(way, "thread-exec")) {
		pthread_create(&thread, NULL, execute, (void *)way);
		pause();
	}
	return 8;
}

int main(int argc, char **argv)
{
	int depth = atoi(argv[2]);

	self = argv[0];
	tick(depth);
	return depth ? go(argv[1], depth) : 0;
}

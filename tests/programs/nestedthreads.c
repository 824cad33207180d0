/*
 * Calls work() with what a thread is called elsewhere, and in its own PID namespace. The first argument is a descriptor
 * of a directory /proc: that of the namespace elsewhere. Each letter of a line from standard input lets threads call it:
 *
 *   a   all that there are, COUNT times each; it begins with three
 *   t   one that is made for that, and ends
 *   r   two like that, one after the other, with the same id in a nested namespace
 *   f   a child process, with a thread that is made there
 *   n   a child process that is the first one of a new namespace; no thread can be made afterwards
 *   s   a child process that was made by a bare system call
 *   c   CROWD threads that stay: rows of ROW ids of the nested namespace, which begin STEP apart
 *   x   a thread that is made for that executes the program again, and "t" comes in that
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT 20
#define THREADS 3
#define CROWD 192
#define ROW 64
#define STEP 4096

static int elsewhere;
static char **arguments;
static pthread_barrier_t begin, end, crowded;

__attribute__((noinline, noclone)) long work(long pid, long tid, long local)
{
	__asm__ volatile("");
	return pid + tid + local;
}

static void call(int count)
{
	char path[64];
	long pid, tid;
	ssize_t size = readlinkat(elsewhere, "thread-self", path, sizeof(path) - 1);

	if (size < 0)
		_exit(3);
	path[size] = 0;
	if (sscanf(path, "%ld/task/%ld", &pid, &tid) != 2)
		_exit(3);
	while (count--)
		if (!work(pid, tid, syscall(SYS_gettid)))
			_exit(3);
}

static void *stay(void *unused)
{
	for (;;) {
		pthread_barrier_wait(&begin);
		call(COUNT);
		pthread_barrier_wait(&end);
	}
	return unused;
}

static void *come(void *id)
{
	*(long *)id = syscall(SYS_gettid);
	call(1);
	return NULL;
}

static void *crowd(void *unused)
{
	call(1);
	pthread_barrier_wait(&crowded);
	for (;;)
		pause();
	return unused;
}

static void *replace(void *unused)
{
	execv("/proc/self/exe", arguments);
	_exit(3);
	return unused;
}

static long in_thread(void)
{
	pthread_t thread;
	long id;

	if (pthread_create(&thread, NULL, come, &id) || pthread_join(thread, NULL))
		_exit(3);
	return id;
}

static void let_next_be(long id)
{
	FILE *last = fopen("/proc/sys/kernel/ns_last_pid", "w");

	if (!last || fprintf(last, "%ld", id - 1) < 0 || fclose(last))
		_exit(3);
}

static void come_together(void)
{
	pthread_t thread;
	long first = in_thread();

	pthread_barrier_init(&crowded, NULL, CROWD + 1);
	for (int n = 0; n < CROWD; n++) {
		let_next_be(first + (1 + n / ROW) * STEP + n % ROW);
		if (pthread_create(&thread, NULL, crowd, NULL))
			_exit(3);
	}
	pthread_barrier_wait(&crowded);
}

static void again(void)
{
	for (int attempt = 0; attempt < 100; attempt++) {
		long first = in_thread();
		char task[64];

		snprintf(task, sizeof(task), "/proc/self/task/%ld", first);
		while (!access(task, F_OK))
			usleep(1000);
		let_next_be(first);
		if (in_thread() == first)
			return;
	}
	_exit(3);
}

static void in_child(pid_t child, int has_threads)
{
	int status;

	if (!child) {
		call(COUNT);
		if (has_threads)
			in_thread();
		_exit(0);
	}
	if (waitpid(child, &status, 0) != child || status)
		_exit(3);
}

static void carry_out(char letter)
{
	pthread_t thread;

	switch (letter) {
	case 'a':
		pthread_barrier_wait(&begin);
		call(COUNT);
		pthread_barrier_wait(&end);
		break;
	case 't':
		in_thread();
		break;
	case 'r':
		again();
		break;
	case 'f':
		in_child(fork(), 1);
		break;
	case 'n':
		if (unshare(CLONE_NEWPID))
			_exit(3);
		in_child(fork(), 1);
		break;
	case 's':
		in_child(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0), 0);
		break;
	case 'c':
		come_together();
		break;
	case 'x':
		if (pthread_create(&thread, NULL, replace, NULL))
			_exit(3);
		pause();
	}
}

int main(int argc, char **argv)
{
	pthread_t threads[THREADS];
	char line[64];

	if (argc < 2)
		return 2;
	arguments = argv;
	elsewhere = atoi(argv[1]);
	pthread_barrier_init(&begin, NULL, THREADS + 1);
	pthread_barrier_init(&end, NULL, THREADS + 1);
	for (int n = 0; n < THREADS; n++)
		if (pthread_create(&threads[n], NULL, stay, NULL))
			return 2;
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		for (char *letter = line; *letter > ' '; letter++)
			carry_out(*letter);
		puts("done");
		fflush(stdout);
	}
	_exit(0);
}

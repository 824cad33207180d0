/*
 * stress SEED THREADS ROUNDS COPY: threads call the functions of stress_sites.c, make threads, fork, start the program
 * anew, load and unload COPY, a copy of the library with these functions, and call those, and take signals whose
 * handlers call the functions as well. ROUNDS 0: until SIGUSR2; "ready" is printed first.
 *
 * Each function gets in its fifth and sixth argument who calls it and that caller's position; positions of one caller
 * are consecutive. Prints a checksum that depends on SEED, THREADS and ROUNDS alone, and then for each function how often
 * it was called, in the library and in COPY. Status 0 if everything was as it should be.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define SHARED_FILE 100
#define MOST_THREADS 16

enum { PUSH, LOAD, FREE, REPEAT, CALL, SYSTEM, COUNT, SITES };
static const char *const names[SITES] = { "push", "load", "free", "repeat", "call", "system", "count" };
static const char *const entries[SITES] = { "stress_push", "stress_load", "stress_free", "stress_repeat", "stress_call",
	"stress_prepare_system", "stress_count" };

static struct shared {
	atomic_ulong calls[SITES], calls_of_copy[SITES], counted, sum, streams, sent, received;
	atomic_int wrong, over, all_sent;
} *shared;

struct stream {
	unsigned long number, position, random, sum;
};

typedef unsigned long function(void *a, void *b, void *c, unsigned long d, unsigned long stream, unsigned long position);
extern function stress_push, stress_load, stress_free, stress_repeat, stress_call, stress_prepare_system, stress_count;
static function *const linked[SITES] = { stress_push, stress_load, stress_free, stress_repeat, stress_call,
	stress_prepare_system, stress_count };

static const char *program, *copy;
static __thread struct stream of_signals;
static unsigned long process;
static atomic_int alive[MOST_THREADS];
static pthread_t threads[MOST_THREADS];
static unsigned long seed;
static int count, rounds;

static void check(int right, int code)
{
	if (!right && !shared->wrong)
		shared->wrong = code;
}

static struct stream new_stream(unsigned long random)
{
	return (struct stream){ .number = ++shared->streams, .random = random * 2654435761UL + 88172645463325252UL };
}

static unsigned long next(struct stream *stream)
{
	unsigned long x = stream->random;

	x ^= x << 13;
	x ^= x >> 7;
	x ^= x << 17;
	return stream->random = x;
}

static void callee(void)
{
}

static void call(struct stream *stream, int site, function *const *functions, atomic_ulong *calls)
{
	unsigned long position = stream->position++, value = next(stream) >> 8, result, expected;
	void (*target)(void) = callee;
	char from[64], to[64];
	void *a = NULL, *b = NULL, *c = NULL;

	switch (site) {
	case PUSH:
		expected = position + 3;
		break;
	case LOAD:
		c = &value, expected = position + value;
		break;
	case FREE:
		expected = position * 7;
		break;
	case REPEAT:
		memset(from, (int)value, sizeof from);
		a = to, b = from, expected = (unsigned long)(to + sizeof to);
		break;
	case CALL:
		c = &target, expected = position;
		break;
	case SYSTEM:
		expected = process;
		break;
	default:
		c = &shared->counted, expected = position + 9;
	}
	calls[site]++;
	result = functions[site](a, b, c, sizeof to, stream->number, position);
	check(result == expected, 10 + site);
	check(site != REPEAT || !memcmp(from, to, sizeof to), 20);
	stream->sum = stream->sum * 31 + position + value + result - expected;
}

static void some_calls(struct stream *stream)
{
	for (int n = next(stream) % 20; n >= 0; n--)
		call(stream, next(stream) % SITES, linked, shared->calls);
}

static void finish(struct stream *stream)
{
	shared->sum += stream->sum;
}

static void on_signal(int number, siginfo_t *info, void *context)
{
	int former = errno;

	if (!of_signals.number)
		of_signals = new_stream(number);
	call(&of_signals, next(&of_signals) % SITES, linked, shared->calls);
	if (number == SIGRTMIN)
		shared->received++;
	errno = former;
}

static void on_enough(int number)
{
	shared->over = 1;
}

static void *short_life(void *argument)
{
	struct stream mine = new_stream((unsigned long)argument);

	some_calls(&mine);
	finish(&mine);
	return NULL;
}

static void await(pid_t pid)
{
	int status;

	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR) {
			check(0, 40);
			return;
		}
	check(status == 0, 41);
}

static void use_copy(struct stream *stream)
{
	void *handle = dlopen(copy, RTLD_NOW | RTLD_LOCAL);
	function *functions[SITES];

	check(!!handle, 42);
	if (!handle)
		return;
	for (int site = 0; site < SITES; site++) {
		functions[site] = (function *)dlsym(handle, entries[site]);
		check(functions[site] && functions[site] != linked[site], 43);
	}
	for (int n = next(stream) % 10; n >= 0; n--)
		call(stream, next(stream) % SITES, functions, shared->calls_of_copy);
	dlclose(handle);
}

static void have_child(unsigned long random)
{
	sigset_t all, former;
	pid_t pid;

	/* What a signal handler does in a child before it has a name of its own would be counted for its parent. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &former);
	pid = fork();
	if (pid == 0) {
		struct stream mine = new_stream(random);
		process = getpid();
		of_signals.number = 0;
		pthread_sigmask(SIG_SETMASK, &former, NULL);
		some_calls(&mine);
		finish(&mine);
		_exit(0);
	}
	pthread_sigmask(SIG_SETMASK, &former, NULL);
	await(pid);
}

static void start_program(unsigned long random)
{
	char text[32];
	const char *const arguments[] = { program, "child", text, copy, NULL };
	pid_t pid;

	snprintf(text, sizeof text, "%lu", random);
	check(posix_spawn(&pid, program, NULL, NULL, (char **)arguments, NULL) == 0, 44);
	await(pid);
}

static void one_round(struct stream *stream)
{
	unsigned long dice = next(stream) % 1000, random = next(stream);
	pthread_t thread;

	some_calls(stream);
	if (dice < 20) {
		check(pthread_create(&thread, NULL, short_life, (void *)random) == 0, 45);
		pthread_join(thread, NULL);
	} else if (dice < 35) {
		have_child(random);
	} else if (dice < 60) {
		use_copy(stream);
	} else if (dice < 62) {
		start_program(random);
	}
	usleep(dice % 8 ? 0 : 300);
}

static void *work(void *argument)
{
	long number = (long)argument;
	struct stream mine = new_stream(seed * MOST_THREADS + number);
	sigset_t signals;

	for (int n = 0; rounds ? n < rounds : !shared->over; n++)
		one_round(&mine);
	finish(&mine);
	sigemptyset(&signals);
	sigaddset(&signals, SIGALRM);
	pthread_sigmask(SIG_BLOCK, &signals, NULL);
	alive[number] = 0;
	while (!shared->all_sent || shared->received < shared->sent)
		usleep(1000);
	return NULL;
}

static void send_signals(void)
{
	struct timespec pause = { 0, 2000000 };
	int some;

	do {
		some = 0;
		for (int n = 0; n < count; n++)
			if (alive[n]) {
				some = 1;
				shared->sent++;
				if (pthread_sigqueue(threads[n], SIGRTMIN, (union sigval){ 0 }))
					shared->sent--;
			}
		nanosleep(&pause, NULL);
	} while (some);
	shared->all_sent = 1;
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART };
	struct itimerval often = { { 0, 4000 }, { 0, 4000 } }, never = { { 0, 0 }, { 0, 0 } };
	int is_child = !strcmp(argv[1], "child"), file = is_child ? SHARED_FILE : memfd_create("shared", 0);

	if (!is_child && (ftruncate(file, sizeof *shared) || dup2(file, SHARED_FILE) < 0))
		return 2;
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, SHARED_FILE, 0);
	program = argv[0];
	process = getpid();
	if (is_child) {
		struct stream mine = new_stream(strtoul(argv[2], NULL, 0));
		copy = argv[3];
		some_calls(&mine);
		use_copy(&mine);
		finish(&mine);
		return 0;
	}
	seed = strtoul(argv[1], NULL, 0), count = atoi(argv[2]), rounds = atoi(argv[3]), copy = argv[4];
	sigaddset(&action.sa_mask, SIGALRM);
	sigaddset(&action.sa_mask, SIGRTMIN);
	sigaction(SIGALRM, &action, NULL);
	sigaction(SIGRTMIN, &action, NULL);
	signal(SIGUSR2, on_enough);
	printf("ready\n");
	fflush(stdout);
	for (long n = 0; n < count; n++)
		alive[n] = 1;
	for (long n = 0; n < count; n++)
		if (pthread_create(&threads[n], NULL, work, (void *)n))
			return 3;
	setitimer(ITIMER_REAL, &often, NULL);
	send_signals();
	setitimer(ITIMER_REAL, &never, NULL);
	for (int n = 0; n < count; n++)
		pthread_join(threads[n], NULL);
	check(shared->received == shared->sent, 50);
	check(shared->counted == shared->calls[COUNT] + shared->calls_of_copy[COUNT], 51);
	printf("%lu\n", shared->sum);
	for (int site = 0; site < SITES; site++)
		printf("%s %lu %lu\n", names[site], shared->calls[site], shared->calls_of_copy[site]);
	return shared->wrong;
}

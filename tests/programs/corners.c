/*
 * corners CASE: rare situations around the probed functions tick() (stepped) and push_tick() (emulated). Prints how often
 * tick() was called; status 0 if all went as it should.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static atomic_ulong calls;
static volatile unsigned long bias = 1;

__attribute__((noinline, noclone)) unsigned long tick(unsigned long n)
{
	unsigned long value = bias + n;
	atomic_fetch_add(&calls, 1);
	return value;
}

/* Reads *where with an instruction that carries a probe. */
long load(volatile long *where);
__asm__(".globl load\n.type load, @function\nload: mov (%rdi), %rax\nret\n.size load, . - load");

/* Calls **where with an instruction that carries a probe, and returns 0 if that had left its own return address. */
long through(void (**where)(void));
__asm__(".globl through\n.type through, @function\nthrough: call *(%rdi)\n1: lea 1b(%rip), %rax\nsub -8(%rsp), %rax\nret\n"
	".size through, . - through");

static void *many(void *arg)
{
	for (int n = 0; n < 300; n++)
		if (tick(n) != n + 1ul)
			exit(10);
	return arg;
}

static pthread_t first_other;

static void *after_leader(void *arg)
{
	usleep(50000);
	many(arg);
	pthread_join(first_other, NULL);
	printf("%lu\n", calls);
	fflush(stdout);
	exit(0);
}

/* The first thread ends, the others go on. */
static int leader_ends(void)
{
	pthread_t id;
	pthread_create(&first_other, NULL, many, NULL);
	pthread_create(&id, NULL, after_leader, NULL);
	pthread_exit(NULL);
}

static void *exec_soon(void *arg)
{
	usleep(20000);
	execl("/proc/self/exe", "corners", "many", NULL);
	exit(11);
}

static void *forever(void *arg)
{
	for (;;)
		tick(1);
	return arg;
}

/* A thread executes a program while others are in the middle of hits; the calls before that are not printed. */
static int exec_among_hits(void)
{
	pthread_t id;
	for (int n = 0; n < 3; n++)
		pthread_create(&id, NULL, forever, NULL);
	pthread_create(&id, NULL, exec_soon, NULL);
	pause();
	return 12;
}

static int many_calls(void)
{
	pthread_t ids[3];
	for (int n = 0; n < 3; n++)
		pthread_create(&ids[n], NULL, many, NULL);
	for (int n = 0; n < 3; n++)
		pthread_join(ids[n], NULL);
	return 0;
}

/* Processes are killed while they fork; all of their children come to their end. */
static int killed_while_forking(void)
{
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	for (int n = 0; n < 60; n++) {
		pid_t pid = fork();
		if (pid == 0) {
			setpgid(0, 0);
			for (;;) {
				pid_t child = fork();
				if (child == 0) {
					tick(1);
					_exit(0);
				}
				waitpid(child, NULL, WNOHANG);
			}
		}
		usleep(3000 + 97 * n);
		kill(pid, SIGKILL);
	}
	while (wait(NULL) > 0)
		;
	many(NULL);
	return 0;
}

/* The page of the code is made writable and back: the mapping is cut in pieces. */
static int cut_mapping(const char *library)
{
	char *page = (char *)((unsigned long)tick & -4096ul);
	many(NULL);
	if (mprotect(page, 4096, PROT_READ | PROT_WRITE | PROT_EXEC))
		return 13;
	if (!dlopen("libutil.so.1", RTLD_NOW) && !dlopen("libm.so.6", RTLD_NOW))
		return 14;
	many(NULL);
	if (mprotect(page, 4096, PROT_READ | PROT_EXEC))
		return 15;
	if (!dlopen("libresolv.so.2", RTLD_NOW))
		return 16;
	many(NULL);
	return 0;
}

/* SIGTRAP is ignored, or blocked, by a program that does not use it. */
static int trap_ignored(void)
{
	signal(SIGTRAP, SIG_IGN);
	many(NULL);
	return 0;
}

static int trap_blocked(void)
{
	sigset_t set;
	sigfillset(&set);
	sigprocmask(SIG_BLOCK, &set, NULL);
	many(NULL);
	return 0;
}

static int fault_descriptor;
static char *faulting;

static void nothing(void)
{
}

/* Answers a fault, before which it does what "arg" says: 'h' hits, 'c' lets a child hit. */
static void *answer_faults(void *arg)
{
	const char *before = arg;
	pid_t pid;
	static char content[4096];
	struct uffd_msg message;
	struct uffdio_copy copy = { .dst = (unsigned long)faulting, .src = (unsigned long)content, .len = 4096 };
	*(long *)content = *before == 'c' ? (long)nothing : 4711;
	if (read(fault_descriptor, &message, sizeof message) != sizeof message)
		exit(17);
	if (*before == 'h')
		tick(2);
	if (*before == 'c' && !(pid = fork())) {
		tick(2);
		_exit(0);
	}
	if (*before == 'c')
		waitpid(pid, NULL, 0);
	if (ioctl(fault_descriptor, UFFDIO_COPY, &copy))
		exit(18);
	return arg;
}

/* The probed instruction waits for another thread of the process. */
static int fault_answered_by_thread(const char *before)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register area = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	pthread_t id;

	faulting = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	fault_descriptor = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
	if (fault_descriptor < 0 || ioctl(fault_descriptor, UFFDIO_API, &api))
		return 77;
	area.range.start = (unsigned long)faulting;
	area.range.len = 4096;
	if (ioctl(fault_descriptor, UFFDIO_REGISTER, &area))
		return 77;
	pthread_create(&id, NULL, answer_faults, (void *)before);
	tick(1);
	if (*before == 'c' ? through((void (**)(void))faulting) : load((long *)faulting) - 4711)
		return 19;
	pthread_join(id, NULL);
	return 0;
}

/* One process with busy threads, and one that hits only now and then: both get on. */
static int busy_and_calm(void)
{
	pthread_t id;
	int status;
	pid_t pid = fork();
	if (pid == 0) {
		for (int n = 0; n < 3; n++)
			pthread_create(&id, NULL, forever, NULL);
		pause();
	}
	many(NULL);
	kill(pid, SIGKILL);
	waitpid(pid, &status, 0);
	return 0;
}

/* A second, shared mapping of the program's own code, where no breakpoint can be written. */
static int shared_mapping(void)
{
	int file = open("/proc/self/exe", O_RDONLY);
	if (mmap(NULL, 1 << 16, PROT_READ | PROT_EXEC, MAP_SHARED, file, 0) == MAP_FAILED)
		return 20;
	dlopen("libresolv.so.2", RTLD_NOW);
	many(NULL);
	return 0;
}

static int not_dumpable(void)
{
	if (prctl(PR_SET_DUMPABLE, 0))
		return 21;
	many(NULL);
	return 0;
}

/* The stack grows in the probed push. */
static int deep(int n)
{
	volatile char frame[3000];
	frame[0] = n;
	tick(n);
	return n ? deep(n - 1) + frame[0] - n : 0;
}

int main(int argc, char **argv)
{
	const char *name = argv[1];
	int status = 30;

	if (!strcmp(name, "leader-ends"))
		status = leader_ends();
	else if (!strcmp(name, "exec-among-hits"))
		status = exec_among_hits();
	else if (!strcmp(name, "many"))
		status = many_calls();
	else if (!strcmp(name, "killed-while-forking"))
		status = killed_while_forking();
	else if (!strcmp(name, "cut-mapping"))
		status = cut_mapping(argv[2]);
	else if (!strcmp(name, "trap-ignored"))
		status = trap_ignored();
	else if (!strcmp(name, "trap-blocked"))
		status = trap_blocked();
	else if (!strcmp(name, "userfault"))
		status = fault_answered_by_thread("");
	else if (!strcmp(name, "userfault-hit"))
		status = fault_answered_by_thread("h");
	else if (!strcmp(name, "userfault-child"))
		status = fault_answered_by_thread("c");
	else if (!strcmp(name, "busy-and-calm"))
		status = busy_and_calm();
	else if (!strcmp(name, "shared-mapping"))
		status = shared_mapping();
	else if (!strcmp(name, "not-dumpable"))
		status = not_dumpable();
	else if (!strcmp(name, "deep"))
		status = deep(100);
	printf("%lu\n", calls);
	return status;
}

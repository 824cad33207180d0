/*
 * Threads that hit a probe for the first time when nobody in the process may make system calls any more, but for those
 * listed here: another one kills the process (seccomp(2)). The filter comes as soon as the code of touch() begins with a
 * jump. Arguments: how many threads, and how often each calls touch(); at the end the calls are printed.
 */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define ALLOW(number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (number), 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

enum { JUMP = 0xe9, PATIENCE = 20 };

static atomic_int sealed;
static unsigned long count;

__attribute__((noinline, noclone)) unsigned long touch(unsigned long n)
{
	__asm__ volatile("" ::: "memory");
	return n + 0x12345;
}

static void *work(void *unused)
{
	unsigned long sum = 0;

	while (!sealed)
		__asm__ volatile("pause");
	for (unsigned long n = 0; n < count; n++)
		sum += touch(n) - 0x12345 == n;
	return (void *)sum;
}

static int seal(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		ALLOW(__NR_write), ALLOW(__NR_exit_group), ALLOW(__NR_exit), ALLOW(__NR_futex), ALLOW(__NR_madvise),
		ALLOW(__NR_rt_sigreturn), ALLOW(__NR_rt_sigprocmask), ALLOW(__NR_munmap), ALLOW(__NR_rseq),
		ALLOW(__NR_set_robust_list), ALLOW(__NR_newfstatat), ALLOW(__NR_fstat), ALLOW(__NR_brk), ALLOW(__NR_clock_nanosleep), ALLOW(__NR_restart_syscall),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = { sizeof filter / sizeof *filter, filter };

	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
		|| syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
}

int main(int argc, char **argv)
{
	int threads = argc > 1 ? atoi(argv[1]) : 2;
	unsigned long sum = 0;
	pthread_t all[64];
	time_t end = time(NULL) + PATIENCE;

	count = argc > 2 ? strtoul(argv[2], NULL, 0) : 1000;
	for (int i = 0; i < threads; i++)
		pthread_create(&all[i], NULL, work, NULL);
	while (*(volatile unsigned char *)touch != JUMP && time(NULL) < end)
		usleep(1000);
	if (*(volatile unsigned char *)touch != JUMP)
		return 3;
	if (seal())
		return 2;
	sealed = 1;
	for (int i = 0; i < threads; i++) {
		void *found;

		pthread_join(all[i], &found);
		sum += (unsigned long)found;
	}
	printf("%lu\n", sum);
	fflush(stdout);
	for (int i = argc > 3 ? atoi(argv[3]) : 0; i > 0; i--)
		nanosleep(&(struct timespec){ .tv_nsec = 100000000 }, NULL);
	return 0;
}

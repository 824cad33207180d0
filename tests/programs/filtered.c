/*
 * filtered HOW: call a function in a loop, in a process that may make few system calls only: 1000 times for each byte
 * of standard input, until its end. HOW is "kill" or "error", what the filter does with other calls, or "strict":
 * seccomp's strict mode, in which only read, write, exit and sigreturn are allowed. Status 0 if all sums were right.
 */
#define _GNU_SOURCE
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static volatile unsigned long bias = 7;

__attribute__((noinline, noclone)) unsigned long stepped(unsigned long n)
{
	return bias + n;
}

#define ALLOW(name) \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static int filter(unsigned int otherwise)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		ALLOW(read), ALLOW(write), ALLOW(exit), ALLOW(exit_group), ALLOW(rt_sigreturn), ALLOW(restart_syscall),
		BPF_STMT(BPF_RET | BPF_K, otherwise),
	};
	struct sock_fprog program = { sizeof code / sizeof *code, code };

	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

int main(int argc, char **argv)
{
	int problem, wrong = 0;
	char byte;

	(void)argc;
	if (strcmp(argv[1], "strict") == 0)
		problem = prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
	else
		problem = filter(strcmp(argv[1], "kill") == 0 ? SECCOMP_RET_KILL_PROCESS : SECCOMP_RET_ERRNO | 1);
	if (problem)
		return 2;
	if (write(1, "ready\n", 6) != 6)
		return 3;
	while (read(0, &byte, 1) == 1) {
		for (unsigned long n = 0; n < 1000; n++)
			if (stepped(n) != n + 7)
				wrong = 1;
		if (write(1, "done\n", 5) != 5)
			return 3;
	}
	syscall(__NR_exit, wrong);
	return 4;
}

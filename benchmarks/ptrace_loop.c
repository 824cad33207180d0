/*
 * ptrace_loop push|step one-cpu|any-cpu OFFSET FILE PROGRAM [ARGUMENT...]: run a program with a breakpoint at the given
 * link address, and at each hit do the least that a ptrace tracer can do: take the registers, write a record of eight
 * of them to a file, and carry the instruction out: "push" emulates push %rbp, "step" puts the byte back and steps.
 *
 * What a hit costs here is the price of ptrace itself; see run.py.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct record {
	unsigned length, pid;
	struct timespec time;
	unsigned long words[8];
};

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static unsigned long load_address(pid_t pid)
{
	char path[64], line[512];
	unsigned long start = 0;
	FILE *maps;

	snprintf(path, sizeof path, "/proc/%d/maps", pid);
	maps = fopen(path, "r");
	if (!maps || !fgets(line, sizeof line, maps) || sscanf(line, "%lx", &start) != 1)
		die(path);
	fclose(maps);
	return start;
}

static void poke(pid_t pid, unsigned long address, unsigned long value)
{
	if (ptrace(PTRACE_POKEDATA, pid, address, value))
		die("POKEDATA");
}

static int wait_for(pid_t pid)
{
	int status;

	while (waitpid(pid, &status, __WALL) < 0)
		if (errno != EINTR)
			die("waitpid");
	return status;
}

int main(int argc, char **argv)
{
	struct user_regs_struct registers;
	unsigned long address, original, trapping;
	int status, emulated;
	FILE *output;
	pid_t pid;

	if (argc < 6)
		return 2;
	emulated = !strcmp(argv[1], "push");
	if (!strcmp(argv[2], "one-cpu")) {
		cpu_set_t one;
		CPU_ZERO(&one);
		CPU_SET(sched_getcpu(), &one);
		if (sched_setaffinity(0, sizeof one, &one))
			die("sched_setaffinity");
	}
	output = fopen(argv[4], "w");
	if (!output)
		die(argv[4]);
	pid = fork();
	if (pid == 0) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		execv(argv[5], argv + 5);
		die(argv[5]);
	}
	wait_for(pid);
	address = load_address(pid) + strtoul(argv[3], NULL, 0);
	original = ptrace(PTRACE_PEEKTEXT, pid, address, 0);
	trapping = (original & ~0xfful) | 0xcc;
	poke(pid, address, trapping);
	ptrace(PTRACE_CONT, pid, 0, 0);
	for (;;) {
		struct record record = { sizeof record, pid };

		status = wait_for(pid);
		if (!WIFSTOPPED(status))
			break;
		if (WSTOPSIG(status) != SIGTRAP) {
			ptrace(PTRACE_CONT, pid, 0, WSTOPSIG(status));
			continue;
		}
		if (ptrace(PTRACE_GETREGS, pid, 0, &registers))
			die("GETREGS");
		if (registers.rip != address + 1)
			die("a trap elsewhere");
		clock_gettime(CLOCK_MONOTONIC, &record.time);
		memcpy(record.words, (unsigned long[]){ registers.rdi, registers.rsi, registers.rdx, registers.rcx,
			registers.r8, registers.r9, registers.rsp, registers.rip - 1 }, sizeof record.words);
		fwrite(&record, sizeof record, 1, output);
		if (emulated) {
			registers.rsp -= 8;
			poke(pid, registers.rsp, registers.rbp);
			if (ptrace(PTRACE_SETREGS, pid, 0, &registers))
				die("SETREGS");
		} else {
			poke(pid, address, original);
			registers.rip = address;
			if (ptrace(PTRACE_SETREGS, pid, 0, &registers) || ptrace(PTRACE_SINGLESTEP, pid, 0, 0))
				die("SINGLESTEP");
			wait_for(pid);
			poke(pid, address, trapping);
		}
		ptrace(PTRACE_CONT, pid, 0, 0);
	}
	fclose(output);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

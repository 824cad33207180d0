/*
 * slots MODE: runs instructions that cannot be emulated, in processes where memory for them is hard to get.
 *
 * MODE is plain, seccomp (strict: only read, write and exit), mdwe (no new executable memory), full (no memory at all),
 * or caught (a handler adds the number of SIGUSR1 signals to what is computed). Writes "ready", and then, for each byte
 * that it reads, a number that the instructions computed; for a "v" it has a vfork child that reads the next byte.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef PR_SET_MDWE
#define PR_SET_MDWE 65
#endif

volatile long total = 1;
unsigned char from[5000], to[5000];

long work(void);

#ifdef __x86_64__
__asm__(".text\n.globl work\n.type work, @function\nwork:\n"
	".globl work_load\nwork_load: mov total(%rip), %rax\n"
	".globl work_count\nwork_count: add $3, %rax\n"
	".globl work_store\nwork_store: mov %rax, total(%rip)\n"
	"lea from(%rip), %rsi\nlea to(%rip), %rdi\nmov $5000, %ecx\n"
	".globl work_repeat\nwork_repeat: rep movsb\n"
	".globl work_call\nwork_call: call *target(%rip)\n"
	".globl work_add\nwork_add: add total(%rip), %rax\n"
	"ret\n.size work, . - work\n"
	"helper: add $1, %rax\nret\n"
	".data\ntarget: .quad helper\n.text\n");
#else
__asm__(".text\n.globl work\n.type work, @function\nwork:\n"
	"push %esi\npush %edi\n"
	".globl work_load\nwork_load: mov total, %eax\n"
	".globl work_count\nwork_count: add $3, %eax\n"
	".globl work_store\nwork_store: mov %eax, total\n"
	"lea from, %esi\nlea to, %edi\nmov $5000, %ecx\n"
	".globl work_repeat\nwork_repeat: rep movsb\n"
	".globl work_call\nwork_call: call *target\n"
	".globl work_add\nwork_add: add total, %eax\n"
	"pop %edi\npop %esi\n"
	"ret\n.size work, . - work\n"
	"helper: add $1, %eax\nret\n"
	".data\ntarget: .long helper\n.text\n");
#endif

static void say(const char *text, size_t size)
{
	if (write(1, text, size) < 0)
		_exit(3);
}

static volatile sig_atomic_t received;

static void on_signal(int number)
{
	received += number == SIGUSR1;
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "plain";
	int failed = 0;
	char byte;

	memset(from, 7, sizeof from);
	if (!strcmp(mode, "mdwe"))
		failed = prctl(PR_SET_MDWE, 1, 0, 0, 0);
	if (!strcmp(mode, "caught"))
		failed = signal(SIGUSR1, on_signal) == SIG_ERR;
	if (!strcmp(mode, "full")) {
		struct rlimit none = { 0, 0 };
		failed = setrlimit(RLIMIT_AS, &none);
	}
	if (!strcmp(mode, "seccomp"))
		failed = prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT, 0, 0, 0);
	say(failed ? "unable\n" : "ready\n", failed ? 7 : 6);
	while (read(0, &byte, 1) == 1) {
		long sum = received;
		char text[32];
		int n = sizeof text;

		if (byte == 'v') {
			if (vfork() == 0)
				_exit(read(0, &byte, 1) != 1);
			continue;
		}
		for (int turn = 0; turn < 100; turn++)
			sum += work() + to[turn];
		text[--n] = '\n';
		for (; sum; sum /= 10)
			text[--n] = '0' + sum % 10;
		say(text + n, sizeof text - n);
	}
	syscall(SYS_exit, 0);
}

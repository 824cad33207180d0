/*
 * traps MODE: a program with uses for SIGTRAP of its own, that calls probed functions. MODE is handled, blocked or ignored.
 *
 * handled: each turn has an int3, a SIGTRAP from kill and one from sigqueue, and prints "KIND VALUE" for each that the
 * handler got. blocked, ignored: prints what is done with SIGTRAP before the turns and behind them.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define FUNCTION(name, code) ".globl " name "\n.type " name ", @function\n" name ": " code "\n.size " name ", . - " name "\n"

__asm__(".text\n"
	FUNCTION("site_emulated", "lea 1(%rdi), %rax\nret")
	FUNCTION("site_load", "mov (%rsi), %rax\nadd %rdi, %rax\nret")
	FUNCTION("site_free", "imul $7, %rdi, %rax\nret")
	".text\n");
unsigned long site_emulated(unsigned long n), site_load(unsigned long n, volatile unsigned long *p), site_free(unsigned long n);

static volatile unsigned long bias = 7;

static void on_trap(int number, siginfo_t *info, void *context)
{
	const char *kind = info->si_code == SI_KERNEL ? "int3" : info->si_code == SI_USER ? "kill" : "queue";

	printf("%s %d\n", kind, info->si_code == SI_QUEUE ? info->si_value.sival_int : 0);
}

static void report(void)
{
	struct sigaction action;
	sigset_t mask;

	sigprocmask(SIG_BLOCK, NULL, &mask);
	sigaction(SIGTRAP, NULL, &action);
	printf("%s, %s\n", sigismember(&mask, SIGTRAP) ? "blocked" : "not blocked",
	       action.sa_handler == SIG_DFL ? "default" : action.sa_handler == SIG_IGN ? "ignored" : "handled");
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_sigaction = on_trap, .sa_flags = SA_SIGINFO };
	sigset_t mask;

	sigemptyset(&mask);
	sigaddset(&mask, SIGTRAP);
	if (!strcmp(argv[1], "handled"))
		sigaction(SIGTRAP, &action, NULL);
	else if (!strcmp(argv[1], "blocked"))
		sigprocmask(SIG_BLOCK, &mask, NULL);
	else
		signal(SIGTRAP, SIG_IGN);
	report();
	for (int n = 0; n < 3; n++) {
		if (site_emulated(n) != n + 1 || site_load(n, &bias) != n + 7 || site_free(n) != n * 7)
			return 1;
		if (strcmp(argv[1], "handled"))
			continue;
		__asm__ volatile("int3");
		kill(getpid(), SIGTRAP);
		sigqueue(getpid(), SIGTRAP, (union sigval){ n });
	}
	report();
	return 0;
}

/*
 * repair COUNT: touch() writes to a page that is protected each time; a SIGSEGV handler makes it writable, and the
 * write is done again. Prints "faults"; status 0 if each write arrived.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static volatile long *page;
static volatile int faults;

__attribute__((noinline, noclone)) void touch(volatile long *where, long value);
#ifdef __x86_64__
__asm__(".globl touch\n.type touch, @function\ntouch: mov %rsi, (%rdi)\nret\n.size touch, . - touch");
#endif

static void on_fault(int number, siginfo_t *info, void *context)
{
	if (info->si_addr != (void *)page || info->si_code != SEGV_ACCERR)
		_exit(3);
	faults++;
	mprotect((void *)page, 4096, PROT_READ | PROT_WRITE);
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
	int count = atoi(argv[1]);

	page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	sigaction(SIGSEGV, &action, NULL);
	for (int n = 0; n < count; n++) {
		mprotect((void *)page, 4096, PROT_READ);
		touch(page, n);
		if (*page != n)
			return 1;
	}
	printf("%d\n", faults);
	return faults == count ? 0 : 1;
}

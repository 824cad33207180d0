/*
 * faults KIND COUNT [waiting]: an instruction at the label at_KIND faults COUNT times, a handler repairs the cause, and the
 * instruction is executed again. Prints how many faults there were; status 0 if each execution did in the end what it
 * should. One that is waiting begins when there is a byte to read.
 *
 *   protected  a store to a read-only page             pointer  a load through a bad pointer, replaced in the context
 *   divide     a division by zero, replaced            bus      a load beyond the end of a file, which then grows
 *   stack      a push to a read-only stack             thread   a store to a page that another thread makes writable
 *   skipped    an invalid instruction, stepped over    bound    (i386) an index out of bounds, replaced
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#define PAGE 4096
#define SITE(name) ".globl at_" name "\n.type at_" name ", @function\nat_" name ": "
#define FUNCTION(name, body) \
	__asm__(".text\n.globl do_" name "\n.type do_" name ", @function\ndo_" name ":\n" body "\n.size do_" name ", . - do_" name "\n")

/* All of them: long do_KIND(void *where, long value). */
#ifdef __x86_64__
enum { IP = REG_RIP, CX = REG_RCX };
FUNCTION("protected", SITE("protected") "mov %rsi, (%rdi)\n ret");
FUNCTION("thread", SITE("thread") "add %rsi, (%rdi)\n ret");
FUNCTION("pointer", "xor %ecx, %ecx\n" SITE("pointer") "mov (%rcx), %rax\n ret");
FUNCTION("bus", SITE("bus") "mov (%rdi), %rax\n ret");
FUNCTION("divide", "mov %rsi, %rax\n xor %edx, %edx\n xor %ecx, %ecx\n" SITE("divide") "div %rcx\n ret");
FUNCTION("stack", "mov %rsp, %rdx\n lea 16(%rdi), %rsp\n" SITE("stack") "push %rsi\n mov %rdx, %rsp\n ret");
FUNCTION("skipped", SITE("skipped") "ud2\n ret");
#else
enum { IP = REG_EIP, CX = REG_ECX };
#define ARGUMENTS "mov 4(%esp), %edx\n mov 8(%esp), %eax\n"
FUNCTION("protected", ARGUMENTS SITE("protected") "mov %eax, (%edx)\n ret");
FUNCTION("thread", ARGUMENTS SITE("thread") "add %eax, (%edx)\n ret");
FUNCTION("pointer", "xor %ecx, %ecx\n" SITE("pointer") "mov (%ecx), %eax\n ret");
FUNCTION("bus", ARGUMENTS SITE("bus") "mov (%edx), %eax\n ret");
FUNCTION("divide", ARGUMENTS "xor %edx, %edx\n xor %ecx, %ecx\n" SITE("divide") "div %ecx\n ret");
FUNCTION("stack", ARGUMENTS "mov %esp, %ecx\n lea 12(%edx), %esp\n" SITE("stack") "push %eax\n mov %ecx, %esp\n ret");
FUNCTION("skipped", SITE("skipped") "ud2\n ret");
FUNCTION("bound", "mov 4(%esp), %edx\n mov $1000, %ecx\n" SITE("bound") "bound %ecx, (%edx)\n mov %ecx, %eax\n ret");
long do_bound(void *, long);
#endif

long do_protected(void *, long), do_thread(void *, long), do_pointer(void *, long), do_bus(void *, long);
long do_divide(void *, long), do_stack(void *, long), do_skipped(void *, long);

static const char *kind;
static char *page;
static volatile long good = 77;
static volatile int faults, wanted;
static int file;

static void on_fault(int number, siginfo_t *info, void *context)
{
	greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;

	faults++;
	if (!strcmp(kind, "pointer"))
		registers[CX] = (greg_t)&good;
	else if (!strcmp(kind, "divide") || !strcmp(kind, "bound"))
		registers[CX] = 7;
	else if (!strcmp(kind, "skipped"))
		registers[IP] += 2;
	else if (!strcmp(kind, "thread"))
		wanted = 1;
	else if (!strcmp(kind, "bus")) {
		if (number != SIGBUS || info->si_code != BUS_ADRERR || info->si_addr != page || ftruncate(file, PAGE))
			_exit(3);
	} else {
		if (number != SIGSEGV || info->si_code != SEGV_ACCERR || ((long)info->si_addr & -PAGE) != (long)page)
			_exit(4);
		mprotect(page, PAGE, PROT_READ | PROT_WRITE);
	}
}

static void *repairer(void *unused)
{
	for (;;) {
		while (!wanted)
			usleep(200);
		usleep(1000);
		wanted = 0;
		mprotect(page, PAGE, PROT_READ | PROT_WRITE);
	}
	return unused;
}

static int attempt(int n)
{
	static const int bounds[] = { 0, 10 };

	if (!strcmp(kind, "protected")) {
		mprotect(page, PAGE, PROT_READ);
		do_protected(page, n);
		return *(long *)page == n;
	}
	if (!strcmp(kind, "thread")) {
		*(long *)page = 100;
		mprotect(page, PAGE, PROT_READ);
		do_thread(page, n);
		return *(long *)page == 100 + n;
	}
	if (!strcmp(kind, "stack")) {
		mprotect(page, PAGE, PROT_READ);
		do_stack(page, n);
		return *(long *)(page + 8) == n;
	}
	if (!strcmp(kind, "bus")) {
		if (ftruncate(file, 0))
			return 0;
		return do_bus(page, 0) == 0;
	}
	if (!strcmp(kind, "pointer"))
		return do_pointer(0, 0) == 77;
	if (!strcmp(kind, "divide"))
		return do_divide(0, 70 + 7 * n) == 10 + n;
	if (!strcmp(kind, "skipped"))
		return do_skipped(0, 0), 1;
#ifdef __i386__
	if (!strcmp(kind, "bound"))
		return do_bound((void *)bounds, 0) == 7;
#endif
	(void)bounds;
	return 0;
}

int main(int argc, char **argv)
{
	static char stack[1 << 16];
	stack_t other = { .ss_sp = stack, .ss_size = sizeof stack };
	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK };
	pthread_t thread;

	kind = argv[1];
	sigaltstack(&other, NULL);
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	sigaction(SIGFPE, &action, NULL);
	sigaction(SIGILL, &action, NULL);
	if (!strcmp(kind, "bus")) {
		file = memfd_create("file", 0);
		page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	} else {
		/* Below it is nothing that a handler could write on, as on a stack. */
		page = (char *)mmap(NULL, 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) + PAGE;
		mprotect(page, PAGE, PROT_READ | PROT_WRITE);
	}
	if (argc > 3) {
		puts("ready");
		fflush(stdout);
		getchar();
	}
	if (!strcmp(kind, "thread"))
		pthread_create(&thread, NULL, repairer, NULL);
	for (int n = 0; n < atoi(argv[2]); n++)
		if (!attempt(n))
			return 1;
	printf("%d\n", faults);
	return 0;
}

/*
 * writes: what a handler wrote must be what the program then finds. Each step prints what it sees; the probes are on
 * `stepped' and `emulated' (called with 5) and `store' (called with an address). With an argument, the code of `patched'
 * is made writable, and it is called once before and twice after `store'. With two, signals interrupt 3000 system calls
 * at `enter', and those that did not find rdi = 1 are counted.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

long stepped(long), emulated(long);
int patched(void);

/* The tracer steps cmp and emulates mov between registers. */
#ifdef __x86_64__
__asm__(".text\n.globl stepped\n.type stepped, @function\nstepped: cmp $0, %rdi\nmov %rdi, %rax\nret\n"
	".globl emulated\n.type emulated, @function\nemulated: mov %rdi, %rax\nret\n");
#else
__asm__(".text\n.globl stepped\n.type stepped, @function\nstepped: cmp $0, %ebx\nmov %ebx, %eax\nret\n"
	".globl emulated\n.type emulated, @function\nemulated: mov %ebx, %eax\nret\n");
#endif
__asm__(".text\n.balign 64\n.globl patched\n.type patched, @function\npatched: mov $1, %eax\nret\n.size patched, . - patched\n");

static volatile long sink;

__attribute__((noinline, noclone)) void store(void *where)
{
	sink += (long)where;
}

static volatile long signals;

static void on_signal(int number)
{
	signals += number;
}

static int interrupted(void)
{
	struct itimerval often = { { 0, 150 }, { 0, 150 } }, never = { { 0, 0 }, { 0, 0 } };
	int wrong = 0;

	signal(SIGALRM, on_signal);
	setitimer(ITIMER_REAL, &often, NULL);
#ifdef __x86_64__
	for (int i = 0; i < 3000; i++) {
		long found = 0, result = 39;
		__asm__ volatile(".globl enter\nenter: syscall" : "+a"(result), "+D"(found) : : "rcx", "r11", "memory");
		wrong += found != 1;
	}
#endif
	setitimer(ITIMER_REAL, &never, NULL);
	printf("wrong %d %d\n", wrong, signals > 0);
	return 0;
}

static long call(long (*function)(long), long value)
{
#ifdef __x86_64__
	return function(value);
#else
	long result;
	__asm__ volatile("call *%1" : "=a"(result) : "r"(function), "b"(value) : "ecx", "edx", "memory");
	return result;
#endif
}

static void show(const char *what, const unsigned char *bytes, int count)
{
	printf("%s", what);
	for (int i = 0; i < count; i++)
		printf(" %02x", bytes[i]);
	printf("\n");
}

int main(int argc, char **argv)
{
	long page = 4096;
	unsigned char *p = mmap(NULL, 5 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	FILE *file = tmpfile();
	unsigned char *shared, *code = (unsigned char *)((long)patched & -page);

	if (argc > 2)
		return interrupted();
	if (argc > 1) {
		if (mprotect(code, page, PROT_READ | PROT_WRITE | PROT_EXEC))
			return 1;
		printf("patched %d\n", patched());
		store(argv[0]);
		printf("patched %d\n", patched());
		printf("patched %d\n", patched());
		return 0;
	}
	printf("stepped %lx\n", call(stepped, 5));
	printf("emulated %lx\n", call(emulated, 5));
	memset(p, 0x11, 5 * page);
	mprotect(p + 2 * page, page, PROT_READ);
	mprotect(p + 4 * page, page, PROT_NONE);
	if (ftruncate(fileno(file), page))
		return 1;
	shared = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
	memset(shared, 0x22, page);

	store(p + 64);			/* within a page */
	show("within", p + 63, 10);
	store(p + page - 3);		/* across two pages */
	show("across", p + page - 4, 10);
	store(p + 2 * page - 3);	/* into a page that is read-only */
	show("read-only", p + 2 * page - 4, 10);
	store(p + 2 * page + 8);
	store(p + 4 * page - 3);	/* into a page that cannot be accessed */
	show("none", p + 4 * page - 4, 4);
	store(shared + page - 3);	/* beyond the end of the file */
	show("beyond", shared + page - 4, 4);
	store(NULL);
	printf("pages %lu %lu\n", (unsigned long)p, (unsigned long)shared);
	return 0;
}

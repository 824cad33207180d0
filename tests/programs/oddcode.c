/*
 * oddcode copy | move | untraced | top | watched | compat: calls work(), does something unusual with its code, and calls work() there.
 * copy: in a copy of the function. move: where mremap(2) has moved it to. untraced: in a child that is made with
 * CLONE_UNTRACED. top: in a second mapping, in the last page of user space; waits for input after that is there.
 * watched: calls loads() three times after input, and prints how often the program was trapped right behind its load,
 * and elsewhere; before that it prints the address of what is loaded. compat: calls narrow(), 32-bit code in this 64-bit program, to be linked at a low address.
 * Status 0 if all results were right.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#define SIZE 4096

typedef int function(int);

/* A page of its own, so that it can be moved. */
__asm__(".text\n.balign 4096\n.globl work\n.type work, @function\n"
	"work: lea 3(,%rdi,8), %eax\n sub %edi, %eax\n ret\n .size work, . - work\n .fill 32, 1, 0x90\n.balign 4096\n");
function work;

/*
 * As 64-bit code, the first two instructions of narrow() are one: mov %rax, %rdx.
 */
__asm__(".text\n.globl narrow\n.type narrow, @function\n"
	".code32\n"
	"narrow: dec %eax\n mov %eax, %edx\n add $5, %edx\n ljmp $0x33, $wide\n .size narrow, . - narrow\n"
	".code64\n"
	"wide: mov %r12, %rsp\n pop %r12\n mov %edx, %eax\n ret\n"
	".globl enter\nenter: push %r12\n mov %rsp, %r12\n mov %edi, %eax\n ljmpl *far_narrow\n"
	".data\nfar_narrow: .long narrow\n.word 0x23\n.text\n");
function enter;

/* Two instructions that load a number: one in the x87 unit. */
long loaded = 14;
int loads(void);
__asm__(".text\n.globl loads\n.type loads, @function\n"
	"loads: mov loaded, %eax\nbehind_first: fildl loaded\nbehind_second: fistpl -8(%rsp)\n add -8(%rsp), %eax\n"
	" ret\n .size loads, . - loads\n");
extern char behind_first[], behind_second[];

static volatile int traps, strays;

static void on_trap(int number, siginfo_t *info, void *context)
{
	char *place = (char *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];

	if (place == behind_first || place == behind_second)
		traps++;
	else
		strays++;
}

static void say(const char *format, unsigned long number)
{
	printf(format, number);
	fflush(stdout);
	getchar();
}

/* Map work() once more, at an address. */
static void *map_again(unsigned long address)
{
	unsigned long start, end, offset;
	char line[500];
	FILE *maps = fopen("/proc/self/maps", "r");

	while (fgets(line, sizeof line, maps)) {
		sscanf(line, "%lx-%lx %*s %lx", &start, &end, &offset);
		if ((unsigned long)work >= start && (unsigned long)work < end)
			return mmap((void *)address, SIZE, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED_NOREPLACE,
				    open("/proc/self/exe", O_RDONLY), offset + (unsigned long)work - start);
	}
	return MAP_FAILED;
}

static void *room(int protection)
{
	return mmap(NULL, SIZE, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

int main(int argc, char **argv)
{
	const char *how = argv[1];
	function *there = work;
	int status = 0;

	if (!strcmp(how, "compat"))
		return enter(10) != 14 || enter(20) != 24;
	if (!strcmp(how, "watched")) {
		struct sigaction action = { .sa_sigaction = on_trap, .sa_flags = SA_SIGINFO };

		sigaction(SIGTRAP, &action, NULL);
		say("%#lx\n", (unsigned long)&loaded);
		for (int n = 0; n < 3; n++)
			if (loads() != 28)
				return 1;
		printf("%d %d\n", traps, strays);
		return 0;
	}
	if (!strcmp(how, "top")) {
		there = map_again(0x7fffffffe000);
		say("%#lx\n", (unsigned long)there);
	}
	if (work(1) != 10)
		return 1;
	if (!strcmp(how, "copy"))
		there = memcpy(room(PROT_READ | PROT_WRITE | PROT_EXEC), (void *)work, 32);
	if (!strcmp(how, "move"))
		there = mremap((void *)work, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, room(PROT_NONE));
	if (!strcmp(how, "untraced")) {
		long child = syscall(SYS_clone, CLONE_UNTRACED | SIGCHLD, 0, 0, 0, 0);

		if (!child)
			_exit(work(2) != 17);
		waitpid(child, &status, 0);
		printf("child %d\n", WIFSIGNALED(status) ? WTERMSIG(status) : 0);
		return work(3) != 24;
	}
	return there(2) != 17 || there(3) != 24;
}

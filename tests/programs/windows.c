/*
 * windows SECONDS THREADS [near]: threads call functions of short instructions in a tight loop until the time is over,
 * while a timer sends signals and children are forked. SIGUSR2 ends it earlier. Status 0 if all results are right.
 *
 * With "near" nothing within reach is free but some pages near the program: so no punned jump fits.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static atomic_int over, wrong, enough;

/* Each returns its argument and the number in its name; "at_..." are labels of single instructions. */
unsigned long rows_7(unsigned long n), dead_3(unsigned long n), near_5(unsigned long n), lead_9(unsigned long n),
	call_11(unsigned long n), loop_6(unsigned long n), crossing_4(unsigned long n), marked_8(unsigned long n);
unsigned long reads_0(const unsigned long *place);
extern const char at_dead, at_near, at_lead, at_call, at_second, at_third;

#define FUNCTION(name, body) ".globl " #name "\n.type " #name ", @function\n" #name ": " body ".size " #name ", . - " #name "\n"
#define PADDING ".fill 16, 1, 0xcc\n"
#define FILLED ".fill 256, 1, 0\n"
#define AT(name) ".globl at_" #name "\nat_" #name ": "

__asm__(".text\n" FILLED
	FUNCTION(rows_7, "push %rbp\n" AT(second) "mov %rsp, %rbp\n" AT(third) "lea 7(%rdi), %rax\npop %rbp\nret\n")
	/* Something leads to what follows only. */
	FUNCTION(lead_9, "xor %eax, %eax\ntest %rdi, %rdi\nje 4f\nmov %rdi, %rax\n" AT(lead) "nop\n4: add $9, %rax\nret\n")
	/* A call at the end of a window. */
	FUNCTION(call_11, "push %rbx\nmov %rdi, %rbx\n" AT(call) "nop\ncall rows_7\nadd $4, %rax\npop %rbx\nret\n")
	/* A loop back to the start of a window. */
	FUNCTION(loop_6, "mov %rdi, %rax\nmov $3, %ecx\n5: inc %rax\ninc %rax\ndec %ecx\njnz 5b\nret\n")
	/* A mark for indirect branches. */
	FUNCTION(marked_8, "endbr64\npush %rdi\npop %rax\nadd $8, %rax\nret\n")
	/* What faults is not the first instruction. */
	FUNCTION(reads_0, "push %rbp\nmov %rsp, %rbp\nmov (%rdi), %rax\npop %rbp\nret\n")
	FILLED
	/* Bytes behind a return that nobody executes. */
	FUNCTION(dead_3, "lea 3(%rdi), %rax\n" AT(dead) "ret\n") PADDING
	/* Something leads to the instruction and to what follows, but there are dead bytes nearby. */
	FUNCTION(near_5, "mov $5, %eax\ntest %edi, %edi\njns 2f\njmp 3f\n2: " AT(near) "add %edi, %eax\n3: cltq\nret\n")
	PADDING
	/* An instruction of five bytes in two pages. */
	".balign 4096, 0\n.fill 4093, 1, 0\n" FUNCTION(crossing_4, "mov $4, %eax\nadd %rdi, %rax\nret\n") FILLED);

static int right(unsigned long n)
{
	unsigned long (*volatile marked)(unsigned long) = marked_8;

	return rows_7(n) == n + 7 && dead_3(n) == n + 3 && near_5(n & 0xffffff) == (n & 0xffffff) + 5 && lead_9(n) == n + 9 &&
		call_11(n) == n + 11 && loop_6(n) == n + 6 && crossing_4(n) == n + 4 && marked(n) == n + 8;
}

static void *spin(void *counter)
{
	unsigned long n;

	for (n = 0; !over; n++)
		if (!right(n))
			wrong = 1;
	*(unsigned long *)counter = n;
	return NULL;
}

static void on_alarm(int number)
{
	if (number != SIGALRM || !right(12345))
		wrong = 2;
}

static unsigned long *page;
static volatile int faults;

static void on_fault(int number, siginfo_t *info, void *context)
{
	ucontext_t *state = context;

	if (number != SIGSEGV || info->si_addr != page || state->uc_mcontext.gregs[REG_RIP] != (long)reads_0 + 4)
		_exit(9);
	faults++;
	mprotect(page, 4096, PROT_READ | PROT_WRITE);
}

static void fault(void)
{
	mprotect(page, 4096, PROT_NONE);
	if (reads_0(page) != 77)
		wrong = 5;
}

static void on_enough(int number)
{
	(void)number;
	enough = 1;
}

static void reserve(uintptr_t start, uintptr_t end)
{
	if (start < end)
		mmap((void *)start, end - start, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
}

/* Leave a hole to which the distances of punned jumps in these functions do not lead. */
static void fill(void)
{
	uintptr_t own = (uintptr_t)&at_dead & -4096ul, position = own - (3ul << 30), last = own + (3ul << 30), start, end;
	uintptr_t starts[128], ends[128];
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	int count = 0;

	while (count < 128 && fgets(line, sizeof line, maps))
		if (sscanf(line, "%lx-%lx", &starts[count], &ends[count]) == 2)
			count++;
	fclose(maps);
	for (int n = 0; n < count && position < last; n++) {
		start = starts[n] < last ? starts[n] : last, end = ends[n];
		reserve(position, start);
		position = end > position ? end : position;
	}
	reserve(position, last);
	munmap((void *)(own - 0x600000), 1ul << 20);
}

int main(int argc, char **argv)
{
	struct itimerval often = { { 0, 3000 }, { 0, 3000 } };
	struct timespec now, start;
	unsigned long counters[16], sum = 0;
	int count = atoi(argv[2]);
	pthread_t ids[16];

	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };

	if (argc > 3)
		fill();
	page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	*page = 77;
	sigaction(SIGSEGV, &action, NULL);
	signal(SIGALRM, on_alarm);
	signal(SIGUSR2, on_enough);
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (int n = 0; n < count; n++)
		pthread_create(&ids[n], NULL, spin, &counters[n]);
	setitimer(ITIMER_REAL, &often, NULL);
	printf("ready\n");
	fflush(stdout);
	do {
		fault();
		pid_t pid = fork();
		if (pid == 0)
			_exit(right(2) ? 0 : 1);
		int status;
		while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
			;
		if (status)
			wrong = 4;
		usleep(10000);
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (!enough && now.tv_sec - start.tv_sec + (now.tv_nsec - start.tv_nsec) / 1e9 < atof(argv[1]));
	over = 1;
	for (int n = 0; n < count; n++) {
		pthread_join(ids[n], NULL);
		sum += counters[n];
	}
	printf("%lu %d\n", sum, faults);
	return wrong;
}

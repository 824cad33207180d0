/*
 * A program that switches between contexts by itself, from signal handlers. What it does is read from standard input:
 *
 * f  call entered() on another stack, and leave it where its second instruction faults
 * p  let many contexts call spot() for ever, each on its own stack, until a timer preempts it
 * r  resume all that was left, and print whether all results are right
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

enum { MANY = 40, STACK = 1 << 16 };

unsigned long entered(unsigned long n, void *place);
unsigned long spot(unsigned long n);

/* In windows of instructions that are too short for a jump. */
__asm__(".text\n.globl entered\n.type entered, @function\nentered: push %rbx\nmov (%rsi), %ecx\npush %rbp\nnop\n"
	"mov %rdi, %rax\npop %rbp\npop %rbx\ninc %rax\nret\n.size entered, . - entered\n");
__asm__(".globl spot\n.type spot, @function\nspot: push %rbx\npush %rbp\nnop\nnop\nnop\nmov %rdi, %rax\npop %rbp\npop %rbx\n"
	"inc %rax\nret\n.size spot, . - spot\n");

static ucontext_t main_context, contexts[MANY];
static volatile int current, is_over, left, count;
static volatile unsigned long results[MANY], word;

static void leave(int number, siginfo_t *info, void *saved)
{
	ucontext_t *context = saved;

	(void)info;
	if (number == SIGSEGV)
		context->uc_mcontext.gregs[REG_RSI] = (greg_t)&word;
	left = 1;
	swapcontext(&contexts[current], &main_context);
}

static void enter_once(void)
{
	results[current] = entered(41, NULL) == 42;
	setcontext(&main_context);
}

static void call_spot(void)
{
	struct itimerval soon = { .it_value = { .tv_usec = 500 } };
	unsigned long n = 1, wrong = spot(0) != 1;

	setitimer(ITIMER_REAL, &soon, NULL); /* only here, so that it preempts nobody else */
	while (!is_over) {
		unsigned long next = spot(n);

		wrong += next != n + 1;
		n = next;
	}
	results[current] = wrong == 0;
	setcontext(&main_context);
}

static void begin(void (*body)(void))
{
	ucontext_t *context = &contexts[count];

	getcontext(context);
	context->uc_stack.ss_sp = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	context->uc_stack.ss_size = STACK;
	context->uc_link = NULL;
	sigemptyset(&context->uc_sigmask);
	makecontext(context, body, 0);
	current = count++;
	swapcontext(&main_context, context);
}

int main(void)
{
	struct sigaction action = { .sa_sigaction = leave, .sa_flags = SA_SIGINFO };
	int order;

	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGALRM, &action, NULL);
	printf("ready\n");
	fflush(stdout);
	while ((order = getchar()) != EOF) {
		unsigned long right = 1;

		if (order == 'f')
			begin(enter_once);
		for (int n = 0; order == 'p' && n < MANY; n++)
			begin(call_spot);
		if (order == 'r') {
			is_over = 1;
			for (current = 0; current < count; current++)
				swapcontext(&main_context, &contexts[current]);
			for (int n = 0; n < count; n++)
				right &= results[n];
			count = is_over = 0;
		}
		if (order != '\n') {
			printf("%s\n", right ? "right" : "wrong");
			fflush(stdout);
		}
	}
	return 0;
}

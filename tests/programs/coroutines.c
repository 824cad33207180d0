/* coroutines: "passed" is left on two stacks of their own and on that of the thread, and returned to in another order. */
#include <stdio.h>
#include <ucontext.h>

static ucontext_t thread, routines[2];
static char stacks[2][1 << 16];

__attribute__((noipa)) int passed(int n)
{
	if (n >= 0)
		swapcontext(&routines[n], &thread);
	__asm__ volatile("");
	return n + 1;
}

static void run(int n)
{
	printf("%d\n", passed(n));
	swapcontext(&routines[n], &thread);
}

int main(void)
{
	for (int n = 0; n < 2; n++) {
		getcontext(&routines[n]);
		routines[n].uc_stack.ss_sp = stacks[n];
		routines[n].uc_stack.ss_size = sizeof stacks[n];
		makecontext(&routines[n], (void (*)(void))run, 1, n);
		swapcontext(&thread, &routines[n]);
	}
	printf("%d\n", passed(-1));
	for (int n = 0; n < 2; n++)
		swapcontext(&thread, &routines[n]);
	return 0;
}

/* Jumps to target() with a stack pointer that leads nowhere; says when that faults. */
#include <signal.h>
#include <unistd.h>

static char other[1 << 16];

__attribute__((noinline, noclone)) void target(void)
{
	__asm__ volatile("");
}

static void fault(int number)
{
	(void)number;
	write(1, "fault\n", 6);
	_exit(0);
}

int main(void)
{
	stack_t stack = {.ss_sp = other, .ss_size = sizeof other};
	struct sigaction action = {.sa_handler = fault, .sa_flags = SA_ONSTACK};

	sigaltstack(&stack, 0);
	sigaction(SIGSEGV, &action, 0);
	sigaction(SIGBUS, &action, 0);
	__asm__ volatile("mov $8, %esp\n\tjmp target");
	return 1;
}

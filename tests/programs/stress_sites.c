/*
 * The functions that stress.c calls. Each begins with the instruction that is probed, but for stress_prepare_system, from
 * which stress_system follows. The result shows whether it was executed, once, and as if at its own address.
 */
#define FUNCTION(name, code) \
	".globl " name "\n.type " name ", @function\n" name ": " code "\n.size " name ", . - " name "\n"

__asm__(".text\n"
	FUNCTION("stress_push", "push %rbp\nmov %rsp, %rbp\nlea 3(%r9), %rax\npop %rbp\nret")
	FUNCTION("stress_load", "mov (%rdx), %rax\nadd %r9, %rax\nret")
	FUNCTION("stress_free", "imul $7, %r9, %rax\nret")
	FUNCTION("stress_repeat", "rep movsb\nmov %rdi, %rax\nret")
	/* The return address stays below the stack pointer, in the red zone. */
	FUNCTION("stress_call", "call *(%rdx)\n1: lea 1b(%rip), %rax\nsub -8(%rsp), %rax\nadd %r9, %rax\nret")
	FUNCTION("stress_prepare_system", "mov $39, %eax") /* getpid */
	/* rcx is where the system call returned to. */
	FUNCTION("stress_system", "syscall\n2: lea 2b(%rip), %r10\nsub %rcx, %r10\nadd %r10, %rax\nret")
	FUNCTION("stress_count", "lock incq (%rdx)\nlea 9(%r9), %rax\nret"));

/*
 * Functions that each execute one kind of instruction at a global label site_*, and check what it did. insns COUNT does
 * all of them COUNT times; status 0 if the processor did what it should each time.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __x86_64__
#define W "q"
#define AX "rax"
#define CX "rcx"
#define DX "rdx"
#define SP "rsp"
#define BP "rbp"
#else
#define W "l"
#define AX "eax"
#define CX "ecx"
#define DX "edx"
#define SP "esp"
#define BP "ebp"
#endif

#define FUNCTION(name, body) \
	__asm__(".text\n.globl do_" name "\n.type do_" name ", @function\ndo_" name ":\n" body "\n.size do_" name ", . - do_" name "\n")
#define SITE(name) ".globl site_" name "\n.type site_" name ", @function\nsite_" name ": "

FUNCTION("ret", SITE("ret") "ret");
FUNCTION("ret_n", "call 1f\n ret\n1: push" W " (%" SP ")\n pop" W " %" CX "\n sub" W " $8, %" SP "\n mov" W " %" CX ", (%" SP ")\n"
	SITE("ret_n") "ret $8");
FUNCTION("jump", "xor %eax, %eax\n" SITE("jump") "jmp 1f\n mov $1, %eax\n1: ret");
FUNCTION("branch", "xor %eax, %eax\n" SITE("branch") "jz 1f\n mov $1, %eax\n1: ret");
FUNCTION("call", "xor %eax, %eax\n" SITE("call") "call 1f\n2: add $2, %eax\n ret\n1: mov (%" SP "), %" CX "\n"
	" call 3f\n3: pop" W " %" DX "\n sub" W " $(3b - 2b), %" DX "\n cmp" W " %" CX ", %" DX "\n jne 4f\n inc %eax\n4: ret");
FUNCTION("push", "mov" W " $0x1234567, %" CX "\n" SITE("push") "push" W " %" CX "\n pop" W " %" AX "\n sub" W " $0x1234567, %" AX "\n ret");
FUNCTION("pushf", "xor %eax, %eax\n stc\n" SITE("pushf") "pushf" W "\n pop" W " %" AX "\n and" W " $0x101, %" AX "\n ret");
FUNCTION("popf", "pushf" W "\n pop" W " %" CX "\n or" W " $1, %" CX "\n push" W " %" CX "\n" SITE("popf") "popf" W "\n"
	" mov $1, %eax\n jnc 1f\n xor %eax, %eax\n1: ret");
FUNCTION("move", "mov" W " $-1, %" AX "\n mov $0x8899aabb, %ecx\n" SITE("move") "mov %ecx, %eax\n"
	" sub" W " %" CX ", %" AX "\n ret");
FUNCTION("nop", "xor %eax, %eax\n" SITE("nop") "nop\n ret");
FUNCTION("long_nop", "xor %eax, %eax\n" SITE("long_nop") "nopl 0(%" AX ",%" AX ",1)\n ret");
FUNCTION("leave", "push" W " %" BP "\n mov" W " %" SP ", %" BP "\n sub" W " $64, %" SP "\n xor %eax, %eax\n" SITE("leave") "leave\n ret");
FUNCTION("locked", "push" W " $0\n" SITE("locked") "lock; add" W " $5, (%" SP ")\n pop" W " %" AX "\n sub" W " $5, %" AX "\n ret");

#ifdef __x86_64__
FUNCTION("fill", "mov %rdi, %rax\n mov %rdx, %rcx\n mov %rsi, %rax\n" SITE("fill") "rep stosb\n ret");
FUNCTION("getpid", "mov $39, %eax\n mov $0x77, %r11\n mov $0x77, %rcx\n" SITE("getpid") "syscall\n"
	" test $0x100, %r11d\n jz 1f\n xor %eax, %eax\n1: ret");
#else
FUNCTION("fill", "push %edi\n mov 8(%esp), %edi\n mov 12(%esp), %eax\n mov 16(%esp), %ecx\n" SITE("fill") "rep stosb\n pop %edi\n ret");
FUNCTION("getpid", "mov $20, %eax\n" SITE("getpid") "int $0x80\n ret");
#endif

long do_ret(void), do_ret_n(void), do_jump(void), do_branch(void), do_call(void), do_push(void), do_pushf(void);
long do_popf(void), do_move(void), do_nop(void), do_long_nop(void), do_leave(void), do_locked(void), do_getpid(void);
void do_fill(char *to, long byte, long count);

static void check(const char *name, int right)
{
	if (!right) {
		printf("%s went wrong\n", name);
		exit(1);
	}
}

int main(int argc, char **argv)
{
	static char buffer[100000];
	int count = atoi(argv[1]);

	for (int n = 0; n < count; n++) {
		do_ret();
		do_ret_n();
		check("jump", do_jump() == 0);
		check("branch", do_branch() == 0);
		check("call", do_call() == 3);
		check("push", do_push() == 0);
		check("pushf", do_pushf() == 1);
		check("popf", do_popf() == 0);
		check("move", do_move() == 0);
		check("nop", do_nop() == 0);
		check("long_nop", do_long_nop() == 0);
		check("leave", do_leave() >= 0);
		check("locked", do_locked() == 0);
		check("getpid", do_getpid() == getpid());
		memset(buffer, 1, sizeof buffer);
		do_fill(buffer, n + 2, sizeof buffer - 1);
		check("fill", buffer[0] == (char)(n + 2) && buffer[sizeof buffer - 2] == (char)(n + 2) && buffer[sizeof buffer - 1] == 1);
	}
	return 0;
}

/*
 * strange KIND [forever]: two threads go through four places (site_move, site_free, site_load, site_in_place) 50 times
 * each. One is like any other; the other does so with what KIND says in its registers, and then sleeps with it for a
 * moment. With "forever" the strange thread, now the first one, having said "there", sleeps on and the other one goes on.
 * Prints how often each went through.
 *
 * stack ADDRESS: that as stack pointer. gs, fs, ds, es SELECTOR. gs_base ADDRESS. flags BITS.
 */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

volatile unsigned long value = 7;
static const struct timespec moment = { 0, 50000000 };
static struct timespec forever = { 1000, 0 };
static const char *kind;
static unsigned long operand;
static int lasting;

/* go(turns, stack pointer or 0, flags or 0, time, said): nothing in here needs a stack. Returns how often it came round. */
long go(long turns, unsigned long stack, unsigned long flags, const struct timespec *time, const char *said);
__asm__(".text\n.globl go\n.type go, @function\n"
	"go: push %rbx\npush %rbp\npush %r12\npush %r13\npush %r14\npush %r15\n"
	"mov %rsp, %r15\nmov %rdi, %r12\nmov %rcx, %r13\nmov %r8, %r14\nxor %ebp, %ebp\n"
	"test %rdx, %rdx\njz 1f\npush %rdx\npopfq\n"
	"1: test %rsi, %rsi\njz 2f\nmov %rsi, %rsp\n"
	"2:\n"
	".globl site_move\n.type site_move, @function\nsite_move: mov %rbp, %rbx\n.size site_move, . - site_move\n"
	".globl site_free\n.type site_free, @function\nsite_free: lea 1(%rbx), %r11\nadd $1, %rbx\n.size site_free, . - site_free\n"
	".globl site_load\n.type site_load, @function\nsite_load: mov value(%rip), %rax\n.size site_load, . - site_load\n"
	".globl site_in_place\n.type site_in_place, @function\nsite_in_place: fld1\nfstp %st(0)\n"
	".size site_in_place, . - site_in_place\n"
	"mov %rbx, %rbp\ncmp %r12, %rbp\njne 2b\n"
	"test %r14, %r14\njz 3f\nmov $1, %edi\nmov %r14, %rsi\nmov $6, %edx\nmov $1, %eax\nsyscall\n"
	"3: test %r13, %r13\njz 4f\nmov %r13, %rdi\nxor %esi, %esi\nmov $35, %eax\nsyscall\n"
	"4: mov %r15, %rsp\npush $0x202\npopfq\ncld\nmov %rbp, %rax\n"
	"pop %r15\npop %r14\npop %r13\npop %r12\npop %rbp\npop %rbx\nret\n.size go, . - go\n");

static void *strange(void *arg)
{
	unsigned long stack = 0, flags = 0, base;
	long *count = arg;
	syscall(SYS_arch_prctl, ARCH_GET_FS, &base);
	if (!strcmp(kind, "stack"))
		stack = operand;
	else if (!strcmp(kind, "flags"))
		flags = operand | 0x202;
	else if (!strcmp(kind, "gs"))
		__asm__ volatile("mov %0, %%gs" : : "r"((unsigned short)operand));
	else if (!strcmp(kind, "ds"))
		__asm__ volatile("mov %0, %%ds" : : "r"((unsigned short)operand));
	else if (!strcmp(kind, "es"))
		__asm__ volatile("mov %0, %%es" : : "r"((unsigned short)operand));
	else if (!strcmp(kind, "gs_base") && getauxval(AT_HWCAP2) & 2)
		__asm__ volatile("wrgsbase %0" : : "r"(operand));
	else if (!strcmp(kind, "fs"))
		__asm__ volatile("mov %0, %%fs" : : "r"((unsigned short)operand));
	*count = go(50, stack, flags, lasting ? &forever : &moment, lasting ? "there\n" : NULL);
	__asm__ volatile("syscall" : : "a"(SYS_arch_prctl), "D"(ARCH_SET_FS), "S"(base) : "rcx", "r11", "memory");
	return NULL;
}

static void *usual(void *arg)
{
	long *count = arg;
	*count = go(50, 0, 0, &moment, NULL);
	while (lasting)
		*count += go(1, 0, 0, &moment, NULL);
	return NULL;
}

int main(int count, char **arguments)
{
	pthread_t one, other;
	long counts[2];
	setvbuf(stdout, NULL, _IOLBF, 0);
	kind = arguments[1];
	operand = strtoul(arguments[2], NULL, 0);
	lasting = count > 3;
	pthread_create(&other, NULL, usual, &counts[1]);
	if (lasting)
		strange(&counts[0]);
	pthread_create(&one, NULL, strange, &counts[0]);
	pthread_join(one, NULL);
	pthread_join(other, NULL);
	printf("%ld %ld\n", counts[0], counts[1]);
	return 0;
}

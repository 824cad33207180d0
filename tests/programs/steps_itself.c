/*
 * A program that single-steps itself, or has alignment checked, while it calls a function: it prints what that returns,
 * how often it was trapped, and where as one number.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#define TRAP 0x100L
#define ALIGNMENT 0x40000L

int main(int argc, char **argv);

static volatile unsigned long traps, places;

static void on_trap(int number, siginfo_t *info, void *context)
{
    unsigned long pc = ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];

    traps++;
    places = places * 31 + (pc - (unsigned long)main) + ((unsigned long)info->si_addr - pc);
}

__attribute__((noinline)) unsigned long leaf(unsigned long value)
{
    asm volatile("" ::: "memory");
    return value ^ value >> 3;
}

__attribute__((noinline)) unsigned long work(unsigned long count)
{
    unsigned long sum = 1;

    asm volatile("" : "+r"(count));
    for (unsigned long n = 0; n < count; n++) {
        sum = sum * 5 + leaf(n);
        if (sum & 4)
            sum -= n << 2;
    }
    return sum;
}

/* Not the compiler's: what is pushed below the stack pointer may be in use. */
unsigned long with_flags(unsigned long flags, unsigned long count);
asm(".globl with_flags\n"
    ".type with_flags, @function\n"
    "with_flags:\n"
    "    pushf\n"
    "    pushf\n"
    "    or %rdi, (%rsp)\n"
    "    mov %rsi, %rdi\n"
    "    popf\n"
    "    call work\n"
    "    popf\n"
    "    ret\n"
    ".size with_flags, . - with_flags\n");

int main(int argc, char **argv)
{
    struct sigaction action;
    unsigned long flags = argc > 1 && !strcmp(argv[1], "alignment") ? ALIGNMENT : TRAP;

    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_trap;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGTRAP, &action, NULL);
    for (unsigned long count = 1; count < 6; count++)
        printf("%lx ", with_flags(flags, count));
    printf("%lu %lx\n", traps, places);
    return 0;
}

/* Tail calls of all kinds, by callers whose code goes over the end of a page; it counts the calls itself. */
#include <signal.h>
#include <stdio.h>

#define KEPT __attribute__((noinline, noclone, noipa))

int far(int), picked(int);
static int (*volatile chosen)(int) = far;
static long calls[7];

KEPT int to_library(int n) { calls[0]++; return far(n); }
KEPT int to_register(int n) { calls[1]++; return chosen(n); }
KEPT int to_ifunc(int n) { calls[2]++; return picked(n); }
KEPT int deep(int n) { return n ? deep(n - 1) + 1 : 0; }
KEPT int to_recursion(int n) { calls[3]++; return deep(n & 7); }
KEPT int chain(int n) { calls[4]++; return n & 1 ? to_library(n) : to_recursion(n); }
KEPT int longer_chain(int n) { calls[5]++; return n & 2 ? chain(n) : to_ifunc(n); }

/* The call ends so many bytes before or after the end of a page; the instruction there goes over it. */
#define SITE(name, before)                                                                  \
    int name(int);                                                                          \
    asm(".pushsection .text.sites, \"ax\"\n.balign 4096\n.skip 4096 - (" #before ") - 9\n"  \
        ".globl " #name "\n.type " #name ", @function\n" #name ":\n.cfi_startproc\n"        \
        "sub $8, %rsp\n.cfi_adjust_cfa_offset 8\ncall longer_chain\n"                       \
        "lea 0x11223344(%rax), %rdx\nmov %rdx, %rax\nadd $8, %rsp\n.cfi_adjust_cfa_offset -8\nret\n"  \
        ".cfi_endproc\n.size " #name ", . - " #name "\n.popsection\n")
SITE(at_1, 1); SITE(at_2, 2); SITE(at_3, 3); SITE(at_6, 6); SITE(at_0, 0); SITE(after_1, -1); SITE(after_4, -4);
static int (*const sites[])(int) = {at_1, at_2, at_3, at_6, at_0, after_1, after_4};

/* A signal handler that ends in a tail call: no call stands before the place that it returns to. */
KEPT void noted(int number) { asm volatile("" : : "r"(number)); }
KEPT void on_signal(int number) { calls[6]++; noted(number); }

int main(void)
{
    for (int n = 0; n < 70; n++) {
        sites[n % 7](n);
        to_register(n);
    }
    signal(SIGUSR1, on_signal);
    for (int n = 0; n < 5; n++)
        raise(SIGUSR1);
    static const char *const names[] = {
        "to_library", "to_register", "to_ifunc", "to_recursion", "chain", "longer_chain", "on_signal"};
    for (int n = 0; n < 7; n++)
        printf("%s %ld\n", names[n], calls[n]);
    return 0;
}

/*
 * Go through code that no compiler made: assembly with unwind information, the stubs of the procedure linkage table, the
 * linker behind them, and the kernel's vdso.
 */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Its frame is found by rbx, and it keeps r12 and rbp where compilers do not; the stack is aligned by 64. */
void odd(void (*function)(int), int number);
__asm__(".text\n"
        ".globl odd\n"
        ".type odd, @function\n"
        "odd:\n"
        "  .cfi_startproc\n"
        "  endbr64\n"
        "  push %rbx\n"
        "  .cfi_adjust_cfa_offset 8\n"
        "  .cfi_rel_offset %rbx, 0\n"
        "  mov %rsp, %rbx\n"
        "  .cfi_def_cfa_register %rbx\n"
        "  sub $200, %rsp\n"
        "  and $-64, %rsp\n"
        "  mov %r12, -24(%rbx)\n"
        "  .cfi_rel_offset %r12, -24\n"
        "  mov %rbp, -48(%rbx)\n"
        "  .cfi_rel_offset %rbp, -48\n"
        "  xor %ebp, %ebp\n"
        "  mov %rdi, %r12\n"
        "  mov %esi, %edi\n"
        "  call *%r12\n"
        "  mov -24(%rbx), %r12\n"
        "  .cfi_restore %r12\n"
        "  mov -48(%rbx), %rbp\n"
        "  .cfi_restore %rbp\n"
        "  mov %rbx, %rsp\n"
        "  .cfi_def_cfa_register %rsp\n"
        "  pop %rbx\n"
        "  .cfi_adjust_cfa_offset -8\n"
        "  .cfi_restore %rbx\n"
        "  ret\n"
        "  .cfi_endproc\n"
        "  .size odd, . - odd\n");

volatile long seen;

__attribute__((noinline)) void work(int number)
{
    struct timespec now;
    char text[32];

    clock_gettime(CLOCK_MONOTONIC, &now);
    memset(text, 'a' + number % 7, sizeof(text));
    text[number % 31] = 0;
    seen += strlen(text) + toupper(text[0]) + atoi("12") + labs(now.tv_nsec) + strtol("7", NULL, 0);
    if (number % 3 == 0)
        odd(work, number + 1);
}

int main(void)
{
    for (int n = 0; n < 100000; n++)
        odd(work, n);
    return 0;
}

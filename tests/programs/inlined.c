/* Calls that the compiler replaces by the code of the function, around one that it does not. */
#include <stdio.h>

extern int here(int n);

__attribute__((noinline)) int here(int n)
{
    __asm__ volatile("" : "+r"(n));
    return n;
}

static inline __attribute__((always_inline)) int inner(int n)
{
    return here(n + 1) + 1;
}

static inline __attribute__((always_inline)) int outer(int n)
{
    return inner(n * 2) ^ 3;
}

__attribute__((noinline)) static int work(int n)
{
    return outer(n) + (n > 2 ? inner(n + 7) : outer(n - 1));
}

int main(int argc, char **argv)
{
    (void)argv;
    for (int n = argc; n < argc + 4; n++)
        printf("%d\n", work(n));
    return 0;
}

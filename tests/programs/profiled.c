/* Counts the calls of its own functions: recursion, threads, longjmp, indirect calls, tail calls.
 *
 *     profiled ROUNDS
 *
 * Each of two threads makes the same calls; the program prints "CALLER CALLEE CALLS" for each pair of functions.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROUND, LEAF, RECURSIVE, JUMPING, THROWING, TAILED, TAIL, FUNCTIONS };
static const char *const names[] = {"round_of", "leaf", "recursive", "jumping", "throwing", "tailed", "tail"};
static long calls[FUNCTIONS][FUNCTIONS];
static __thread jmp_buf target;

#define CALLED(caller, callee) __atomic_add_fetch(&calls[caller][callee], 1, __ATOMIC_RELAXED)
#define FUNCTION __attribute__((noipa, noinline))

FUNCTION long leaf(long n)
{
    return n * 3 + 1;
}

FUNCTION long recursive(long n)
{
    long below;
    if (n == 0) {
        CALLED(RECURSIVE, LEAF);
        below = leaf(n);
    } else {
        CALLED(RECURSIVE, RECURSIVE);
        below = recursive(n - 1);
    }
    __asm__ volatile("" : "+r"(below)); /* so that neither call is a jump */
    return below + n;
}

FUNCTION void throwing(long n)
{
    if (n == 0)
        longjmp(target, 1);
    CALLED(THROWING, THROWING);
    throwing(n - 1);
    __asm__ volatile("");
}

FUNCTION long jumping(long n)
{
    if (setjmp(target) == 0) {
        CALLED(JUMPING, THROWING);
        throwing(n);
    }
    CALLED(JUMPING, LEAF);
    return leaf(n);
}

FUNCTION long tail(long n)
{
    CALLED(TAIL, LEAF);
    return leaf(n) + n;
}

FUNCTION long tailed(long n)
{
    return tail(n + 1); /* a jump: the caller of "tail" is the caller of "tailed" */
}

static long (*volatile indirect)(long) = leaf;

FUNCTION long round_of(long n)
{
    long sum;
    CALLED(ROUND, RECURSIVE);
    sum = recursive(n % 5);
    CALLED(ROUND, JUMPING);
    sum += jumping(n % 3);
    CALLED(ROUND, TAILED);
    CALLED(ROUND, TAIL);
    sum += tailed(n);
    CALLED(ROUND, LEAF);
    sum += indirect(n);
    return sum;
}

static void *thread(void *rounds)
{
    long sum = 0;
    for (long n = 0; n < (long)rounds; n++)
        sum += round_of(n);
    return (void *)sum;
}

int main(int argc, char **argv)
{
    long rounds = argc > 1 ? atol(argv[1]) : 100;
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, thread, (void *)rounds);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    printf("outside round_of %ld\n", 2 * rounds);
    for (int caller = 0; caller < FUNCTIONS; caller++)
        for (int callee = 0; callee < FUNCTIONS; callee++)
            if (calls[caller][callee])
                printf("%s %s %ld\n", names[caller], names[callee], calls[caller][callee]);
    return 0;
}

/* Coroutines that make a tail call on one thread, and return from it on another one. */
#include <pthread.h>
#include <stdlib.h>
#include <ucontext.h>

#define KEPT __attribute__((noinline, noclone, noipa))

static ucontext_t coroutine, resumer;
static char stack[1 << 16];

KEPT int suspended(int n) { swapcontext(&coroutine, &resumer); return n; }
KEPT int to_suspended(int n) { return suspended(n); }
KEPT void body(void) { if (to_suspended(5) != 5) abort(); }
/* No call stands before the place that the first function of a coroutine returns to. */
KEPT void starts(void) { body(); }
KEPT void *resume(void *unused) { swapcontext(&resumer, &coroutine); return unused; }

int main(void)
{
    for (int n = 0; n < 3; n++) {
        getcontext(&coroutine);
        coroutine.uc_stack.ss_sp = stack;
        coroutine.uc_stack.ss_size = sizeof stack;
        coroutine.uc_link = &resumer;
        makecontext(&coroutine, starts, 0);
        resume(0);
        pthread_t thread;
        pthread_create(&thread, 0, resume, 0);
        pthread_join(thread, 0);
    }
    return 0;
}

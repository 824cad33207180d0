/*
 * A process, its child and its grandchild print their ids, and die with their parents. At each SIGUSR1 a process calls
 * step five times and prints its id again.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>

static volatile int bias = 1;

/* It begins with an instruction that the tracer does not emulate, if addresses are not relative. */
__attribute__((noipa)) int step(int n) { return bias + n; }

static void print_id(void)
{
    char line[16];
    int size = snprintf(line, sizeof line, "%d\n", getpid());
    if (write(1, line, size) != size)
        _exit(1);
}

int main(void)
{
    sigset_t awaited;
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGUSR1);
    sigprocmask(SIG_BLOCK, &awaited, NULL);
    for (int generation = 0; generation < 2; generation++) {
        print_id();
        if (fork())
            goto wait;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    }
    print_id();
wait:
    for (int number; !sigwait(&awaited, &number);) {
        for (int n = 0; n < 5; n++)
            if (step(n) != n + 1)
                return 1;
        print_id();
    }
}

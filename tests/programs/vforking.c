/*
 * A process whose child waits for its own child of vfork(2). That one prints its id, reads a byte, and executes this file
 * again, which calls step five times and prints the id again. The two print and die with their parents.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>

static volatile int bias = 1;
__attribute__((noipa)) int step(int n) { return bias + n; }

static void print_id(void)
{
    char line[16];
    int size = snprintf(line, sizeof line, "%d\n", getpid());
    if (write(1, line, size) != size)
        _exit(1);
}

int main(int argc, char **argv)
{
    char byte;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (argc > 1) {
        for (int n = 0; n < 5; n++)
            if (step(n) != n + 1)
                return 1;
        print_id();
        pause();
    }
    if (fork())
        for (;;)
            pause();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (!vfork()) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        print_id();
        if (read(0, &byte, 1) == 1)
            execl("/proc/self/exe", argv[0], "again", (char *)NULL);
        _exit(1);
    }
    pause();
}

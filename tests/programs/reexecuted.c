/* Executes itself again from within a function, as often as its argument says.
 *
 *     reexecuted TIMES
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define FUNCTION __attribute__((noipa, noinline))

FUNCTION long step_work(long n)
{
    return n * 3 + 1;
}

FUNCTION long step_again(char *self, long n)
{
    char rest[32];
    snprintf(rest, sizeof rest, "%ld", step_work(n) / 3 - 1);
    execl(self, self, rest, (char *)NULL);
    return n; /* execl has failed */
}

int main(int argc, char **argv)
{
    long n = argc > 1 ? atol(argv[1]) : 0;
    if (step_work(n) != n * 3 + 1)
        return 1;
    return n > 0 ? (int)step_again(argv[0], n) : 0;
}

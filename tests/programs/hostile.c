/*
 * Names that a test puts line ends and escape sequences into: of a symbol, a section, a process.
 *
 * Calls the function as often as the argument says; with another argument calls 'tick' for each byte of input then.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>

volatile int calls;

__attribute__((noinline, section("evil_section_name_that_is_overwritten")))
void evil_function_name_that_is_overwritten(void)
{
    calls++;
}

__attribute__((noinline)) void tick(void)
{
    calls++;
}

int main(int argc, char **argv)
{
    prctl(PR_SET_NAME, "a b\x1b[7m\nFORGED\x9b");
    for (int n = atoi(argv[1]); n > 0; n--)
        evil_function_name_that_is_overwritten();
    if (argc > 2) {
        puts("ready");
        fflush(stdout);
        while (getchar() != EOF)
            tick();
    }
    return 0;
}

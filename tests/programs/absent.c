/* Strings that a handler cannot log whole: at an address that is not there, and longer than it asks for. */

#include <string.h>

static char many[3000];

__attribute__((noinline)) long given(const char *first, const char *second, long number)
{
    __asm__ volatile("" : : "r"(first), "r"(second) : "memory");
    return number;
}

int main(void)
{
    memset(many, 'x', sizeof many - 1);
    return given((const char *)8, "second", 3) + given(many, "second", 0) + given("first", "", 1) != 4;
}

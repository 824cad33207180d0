/* Serves requests with members of several types: five calls, one after the other, the n-th with a total of 4 + n. */
#include <string.h>

enum color { RED, GREEN = 5 };
struct head { int size; short kind; };
struct req { struct head head; long total; int values[3]; enum color color; const char *path; };

int errors = 3;

__attribute__((noinline)) int serve(struct req *req, const char *name)
{
    errors++;
    __asm__ volatile("" ::: "memory");
    return (int)req->total + (int)strlen(name);
}

__attribute__((noinline)) int finish(int code)
{
    __asm__ volatile("" ::: "memory");
    return code;
}

int main(void)
{
    struct req req = {{10, -2}, 4, {7, -8, 9}, GREEN, "/etc/x"};
    for (int i = 0; i < 5; i++) {
        serve(&req, i % 2 ? "odd" : "even");
        finish(i);
        req.total++;
    }
    return 0;
}

/* Results and arguments of all kinds: "results" prints what each call was given and has returned. */
#include <stdio.h>

struct pair { int left, right; };
struct mixed { double real; int whole; };
struct large { long first, second, third; };
struct wide { long low, high; };

__attribute__((noipa)) double real_of(int n) { return n * 1.5; }
__attribute__((noipa)) float small_of(int n) { return n * 1.5f; }
__attribute__((noipa)) long double long_of(int n) { return n * 1.5L; }
__attribute__((noipa)) struct pair pair_of(int n) { struct pair it = { n, -n }; return it; }
__attribute__((noipa)) struct mixed mixed_of(int n) { struct mixed it = { n, n + 1 }; return it; }
__attribute__((noipa)) struct wide wide_of(int n) { struct wide it = { n, -n }; return it; }
__attribute__((noipa)) struct large large_of(int n) { struct large it = { n, n + 1, n + 2 }; return it; }
__attribute__((noipa)) void nothing_of(int n) { __asm__ volatile("" : : "r"(n)); }
__attribute__((noipa)) long long longer_of(int n) { return -5000000000LL * n; }

__attribute__((noipa)) int beside(int a, double d, float f, int b, long double l, struct large s, int c) {
    return a + (int)d + (int)f + b + (int)l + (int)s.second + c;
}

/* A compiler that sees all calls may leave "unused" out, and pass the others in other registers. */
static __attribute__((noinline)) long area(const struct pair *p, int unused, long k) { return p->left * p->right * k; }

int main(int argc, char **argv) {
    struct pair pair = pair_of(6);
    struct mixed mixed = mixed_of(7);
    struct large large = large_of(8);
    struct wide wide = wide_of(9);
    nothing_of(argc);
    printf("%f %f %Lf\n", real_of(3), small_of(3), long_of(3));
    printf("%d %d %d %ld %ld %ld\n", pair.right, mixed.whole, (int)mixed.real, large.third, wide.high, (long)longer_of(2));
    printf("%d\n", beside(argc, 2.5, 3.25f, -4, 1.5L, large, 11));
    printf("%ld\n", area(&pair, 77, argc + 9));
    return argv == 0;
}

// Time of loops that store to and load from a structure: "instruction, nanoseconds" of the fastest of some rounds.
#include <stdio.h>
#include <time.h>

struct record {
    volatile long a, b, c;
};
struct record watched, other;

__attribute__((noinline)) static void store(struct record *r, long n) {
    for (long i = 0; i < n; i++) r->a = i, r->b = i, r->c = i;
}

__attribute__((noinline)) static long load(struct record *r, long n) {
    long sum = 0;
    for (long i = 0; i < n; i++) sum += r->a, sum ^= r->b, sum += r->c;
    return sum;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

int main(void) {
    enum { ROUNDS = 600, N = 20000 };
    double least[3] = {1e9, 1e9, 1e9};
    for (int round = 0; round < ROUNDS; round++) {
        double times[4] = {now()};
        store(&other, N), times[1] = now();
        load(&other, N), times[2] = now();
        store(&watched, N), times[3] = now();
        for (int i = 0; i < 3; i++)
            if (times[i + 1] - times[i] < least[i]) least[i] = times[i + 1] - times[i];
    }
    for (int i = 0; i < 3; i++) fprintf(stderr, "time %.3f\n", least[i] / N / 3);
    return 0;
}

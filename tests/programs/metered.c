/* Do work in threads, and pass to "meter" what the kernel's other interfaces show of the thread.
 *
 * "before" was read just before the call, and "after" just after the thread's previous one. So a counter that is read in
 * call n is between the "before" of call n and the "after" of call n + 1.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 12, PAGE = 4096 };

struct reading {
    unsigned long cpu, wall, slept, minor, switches;
};

static unsigned long time_of(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000UL + time.tv_nsec;
}

static struct reading now(unsigned long slept) {
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return (struct reading){time_of(CLOCK_THREAD_CPUTIME_ID), time_of(CLOCK_MONOTONIC), slept, usage.ru_minflt,
                            usage.ru_nvcsw + usage.ru_nivcsw};
}

__attribute__((noinline)) void meter(struct reading *before, struct reading *after, unsigned long thread) {
    __asm__ volatile("" ::"r"(before), "r"(after), "r"(thread) : "memory");
}

static volatile unsigned long sink;

static void *work(void *argument) {
    unsigned long thread = (unsigned long)argument;
    unsigned long slept = 0;
    struct reading after = now(slept);
    for (int round = 0; round < ROUNDS; round++) {
        char *pages = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (unsigned long n = 0; n < thread + round; n++) pages[n * PAGE] = 1;
        for (int spin = 0; spin < 2000000 * (round % 3); spin++) sink++;
        if (round % 2) {
            struct timespec nap = {0, 20000000};
            nanosleep(&nap, NULL);
            slept += nap.tv_nsec;
        }
        struct reading before = now(slept);
        meter(&before, &after, thread);
        after = now(slept);
        munmap(pages, 64 * PAGE);
    }
    return NULL;
}

int main(void) {
    pthread_t threads[3];
    for (unsigned long n = 0; n < 3; n++) pthread_create(&threads[n], NULL, work, (void *)n);
    for (int n = 0; n < 3; n++) pthread_join(threads[n], NULL);
    puts("done");
    return 0;
}

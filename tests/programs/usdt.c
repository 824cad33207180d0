/*
 * USDT probes with arguments of all widths, in registers, memory and numbers, and a guarded one.
 *
 * usdt ROUNDS: print what each probe gets as arguments, and what the semaphore of the guarded one was.
 * usdt wait: for each line on standard input print that semaphore and how often the guarded place was passed;
 *   "fork" has a child do it, "exec" another image of this program, "call" comes by the guarded place first.
 *
 * With -DPLAIN no probe has a semaphore.
 */
#ifndef PLAIN
#define _SDT_HAS_SEMAPHORES 1
#endif
#include <sys/sdt.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef PLAIN
#define SEMAPHORE(name) unsigned short demo_##name##_semaphore __attribute__((section(".probes")))
SEMAPHORE(widths);
SEMAPHORE(many);
SEMAPHORE(guarded);
SEMAPHORE(twelve);
SEMAPHORE(number);
#define ENABLED(name) __builtin_expect(*(volatile unsigned short *)&demo_##name##_semaphore, 0)
#else
#define ENABLED(name) 1
#endif

static int table[8] = {10, -20, 30, -40, 50, -60, 70, -80};
long shared = -7000000000L % 2147483647;
static long passed;

__attribute__((noinline)) static void widths(long n) {
    signed char byte = (signed char)(n * 77 - 100);
    unsigned char letter = (unsigned char)(n * 91 + 200);
    short small = (short)(n * 12345 - 30000);
    unsigned short port = (unsigned short)(n * 23456 + 40000);
    int whole = (int)(n * 123456789 - 2000000000);
    unsigned natural = (unsigned)n * 1234567891u + 3000000000u;
    long word = n * 1234567 - 99999999;
    const char *text = table[n & 7] < 0 ? "below" : "above";
    shared += n;
    DTRACE_PROBE10(demo, widths, byte, letter, small, port, whole, natural, word, text, table[n & 7], shared);
    printf("widths %d %u %d %u %d %u %ld %s %d %ld\n", byte, letter, small, port, whole, natural, word, text,
           table[n & 7], shared);
}

__attribute__((noinline)) static void many(long n) {
    /* The same probe at three places, each with arguments elsewhere. */
    if (n % 3 == 0) {
        DTRACE_PROBE2(demo, many, 5, n);
        printf("many 5 %ld\n", n);
    } else if (n % 3 == 1) {
        DTRACE_PROBE2(demo, many, n * 2, -6);
        printf("many %ld -6\n", n * 2);
    } else {
        DTRACE_PROBE2(demo, many, table[n & 7], shared);
        printf("many %d %ld\n", table[n & 7], shared);
    }
}

__attribute__((noinline)) static void twelve(long n) {
    DTRACE_PROBE12(demo, twelve, n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7, n + 8, n + 9, n + 10, n + 11);
}

__attribute__((noinline)) static void number(double n) {
    float single = (float)n;
    DTRACE_PROBE2(demo, number, n, single);
}

__attribute__((noinline)) static void guarded(long n) {
    if (ENABLED(guarded)) {
        DTRACE_PROBE1(demo, guarded, n);
        passed++;
    }
}

static void report(void) {
#ifndef PLAIN
    printf("semaphore %u passed %ld\n", *(volatile unsigned short *)&demo_guarded_semaphore, passed);
#else
    printf("passed %ld\n", passed);
#endif
    fflush(stdout);
}

static void answer(const char *command, char **argv) {
    if (strcmp(command, "call\n") == 0)
        guarded(1);
    if (strcmp(command, "fork\n") == 0) {
        pid_t child = fork();
        if (child == 0) {
            guarded(2);
            report();
            _exit(0);
        }
        waitpid(child, 0, 0);
    } else if (strcmp(command, "exec\n") == 0) {
        execl("/proc/self/exe", argv[0], "wait", (char *)0);
    } else
        report();
}

int main(int argc, char **argv) {
    char line[16];
    if (argc > 1 && strcmp(argv[1], "wait") == 0) {
        printf("ready\n");
        fflush(stdout);
        while (fgets(line, sizeof line, stdin))
            answer(line, argv);
        return 0;
    }
    for (long n = 0; n < (argc > 1 ? atol(argv[1]) : 3); n++) {
        widths(n);
        many(n);
        twelve(n);
        number((double)n + 0.25);
        guarded(n);
    }
    report();
    return 0;
}

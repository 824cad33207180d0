// Accesses to the fields of structures, which the program counts itself: field, function, reads, writes.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <threads.h>

#define ALONE __attribute__((noinline, noclone))
// The structure is copied in words of 8 bytes.
#define COPIED(field) \
    printf("%zu copy %zu 0\n", offsetof(struct record, field), n * ((sizeof watched.field + 7) / 8))

struct inner {
    volatile short low;
    volatile int high;
};

struct record {
    volatile char flag;
    volatile long count;
    struct inner part;
    volatile int table[6];
    union {
        volatile double real;
        volatile uint64_t bits;
    };
    volatile char tail;
    volatile long last;
};

static struct record watched;
struct record neighbours[2];
struct record shared;

ALONE static void mark(volatile struct record *r, int n) {
    for (int i = 0; i < n; i++) r->flag = (char)i;
}

ALONE static long add(volatile struct record *r, int n) {
    long sum = 0;
    for (int i = 0; i < n; i++) {
        r->count = r->count + 1;
        sum += r->part.high;
    }
    return sum;
}

ALONE static long walk(volatile struct record *r, int n) {
    long sum = 0;
    for (int i = 0; i < n; i++) {
        r->table[i % 6] = i;
        sum += r->table[(i + 1) % 6];
    }
    return sum;
}

// A vector of 16 bytes over flag, the hole behind it, and count.
ALONE static void vector(struct record *r, int n) {
    for (int i = 0; i < n; i++) __asm__ volatile("movups %0, %%xmm1" ::"m"(*(char(*)[16])r) : "xmm1");
}

// Four bytes, of which only the last one is in the structure: it is flag.
ALONE static void below(char *r, int n) {
    for (int i = 0; i < n; i++) __asm__ volatile("movl -3(%0), %%eax" ::"r"(r) : "eax", "memory");
}

// Elements of 4 bytes from the beginning of table on.
ALONE static void strings(struct record *r, int n) {
    for (int i = 0; i < n; i++) {
        void *to = (void *)r->table;
        long count = 6;
        __asm__ volatile("rep stosl" : "+D"(to), "+c"(count) : "a"(i) : "memory");
    }
}

// All of another structure, in words of 8 bytes and downwards: the direction flag is set.
ALONE static void copy(struct record *from, struct record *to, int n) {
    for (int i = 0; i < n; i++) {
        char *source = (char *)from + sizeof *from - 8, *target = (char *)to + sizeof *to - 8;
        long count = sizeof *from / 8;
        __asm__ volatile("std; rep movsq; cld" : "+S"(source), "+D"(target), "+c"(count)::"memory", "cc");
    }
}

static int thread(void *n) {
    for (int i = 0; i < *(int *)n; i++) shared.last += i;
    return 0;
}

int main(int argc, char **argv) {
    int n = argc > 1 ? atoi(argv[1]) : 60;
    long sum = 0;
    if (argc > 2) getchar();
    for (int each = 0; each < 2; each++) {
        mark(&neighbours[each], n), sum += add(&neighbours[each], n), sum += walk(&neighbours[each], n);
        vector(&neighbours[each], n), below((char *)&neighbours[each], n), strings(&neighbours[each], n);
    }
    mark(&watched, n), sum += add(&watched, n), sum += walk(&watched, n);
    vector(&watched, n), below((char *)&watched, n), strings(&watched, n);
    copy(&watched, &neighbours[0], n);
    thrd_t threads[2];
    for (int each = 0; each < 2; each++) thrd_create(&threads[each], thread, &n);
    for (int each = 0; each < 2; each++) thrd_join(threads[each], NULL);
    if (sum == 1) puts("unlikely");
    // Offset of the field or hole, function, reads, writes.
    printf("%zu mark 0 %d\n", offsetof(struct record, flag), n);
    printf("%zu add %d %d\n", offsetof(struct record, count), n, n);
    printf("%zu add %d 0\n", offsetof(struct record, part.high), n);
    printf("%zu walk %d %d\n", offsetof(struct record, table), n, n);
    printf("%zu vector %d 0\n1 vector %d 0\n", offsetof(struct record, flag), n, n);
    printf("%zu vector %d 0\n", offsetof(struct record, count), n);
    printf("%zu below %d 0\n", offsetof(struct record, flag), n);
    printf("%zu strings 0 %d\n", offsetof(struct record, table), 6 * n);
    COPIED(flag), COPIED(count), COPIED(part.low), COPIED(part.high), COPIED(table), COPIED(real), COPIED(tail);
    COPIED(last);
    for (int each = 0; each < 3; each++) printf("%d copy %d 0\n", (int[]){1, 18, 57}[each], n);
    return 0;
}

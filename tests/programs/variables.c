/* Functions with variables of all kinds, in registers, in memory, folded away: what they are is compared with gdb. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum state { IDLE, BUSY = 7, FAILED = -3 };
struct point { int x, y; };
struct wide { long first; unsigned char second; };
struct packet {
    struct packet *next;
    enum state state;
    unsigned kind : 3, length : 12;
    int delta : 6;
    struct point at;
    char name[16];
    union { uint64_t word; struct { uint32_t low, high; }; };
    short values[5];
    _Bool is_last;
};

static unsigned long seed = 12345;
static int calls;
int table[8] = { 3, 1, 4, 1, 5, 9, 2, 6 };
struct packet *head;

static unsigned next(void) { seed = seed * 6364136223846793005UL + 1442695040888963407UL; return seed >> 33; }

static inline int mixed(int a, int b) { int low = a & 15, high = b << 4; return low | high; }

__attribute__((noipa)) static int distance(struct point from, struct point to) {
    int dx = to.x - from.x, dy = to.y - from.y;
    int sum = (dx < 0 ? -dx : dx) + (dy < 0 ? -dy : dy);
    calls++;
    return sum;
}

__attribute__((noinline)) static long folded(struct wide wide, short scale, signed char bias) {
    long total = wide.first * scale;
    for (int i = 0; i < wide.second; i++) {
        long part = total ^ i;
        total += part % 7 + bias;
    }
    return total;
}

__attribute__((noipa)) static struct packet *make(int number, const char *name) {
    struct packet *made = calloc(1, sizeof *made);
    made->state = number % 3 == 0 ? IDLE : number % 3 == 1 ? BUSY : FAILED;
    made->kind = number & 7;
    made->length = number * 37;
    made->delta = number % 50 - 25;
    made->at = (struct point){ number, -number };
    snprintf(made->name, sizeof made->name, "%s-%d", name, number);
    made->low = number; made->high = ~number;
    for (int i = 0; i < 5; i++) made->values[i] = i * number - 300;
    made->is_last = number == 0;
    made->next = head;
    head = made;
    return made;
}

__attribute__((noinline)) static int sorted(int *numbers, int count) {
    int moves = 0;
    for (int i = 1; i < count; i++) {
        int key = numbers[i], j = i - 1;
        while (j >= 0 && numbers[j] > key) { numbers[j + 1] = numbers[j]; j--; moves++; }
        numbers[j + 1] = key;
    }
    return moves;
}

__attribute__((noinline)) static uint32_t hashed(const unsigned char *text, size_t length) {
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < length; i++) {
        unsigned char byte = text[i];
        hash = (hash ^ byte) * 16777619u;
        if (hash & 1) { uint32_t turned = hash << 3 | hash >> 29; hash = turned ^ (uint32_t)i; }
    }
    return hash;
}

__attribute__((noinline)) static long many(int a, long b, char c, unsigned short d, int e, long f, int g, long h,
                                           struct packet *packet) {
    long first = a + b * c, second = d - e;
    long third = f ^ g, fourth = h + packet->length;
    if (first > second) { long kept = first; first = second; second = kept; }
    calls += mixed(a, g);
    return first * third - second * fourth + mixed((int)h, e);
}

__attribute__((noinline)) static int walked(struct packet *from, enum state wanted) {
    int found = 0, seen = 0;
    for (struct packet *each = from; each; each = each->next) {
        enum state state = each->state;
        int weight = each->delta;
        if (state == wanted) found += weight + each->values[seen % 5];
        seen++;
    }
    return found * 100 + seen;
}

__attribute__((noinline)) static unsigned recursive(unsigned depth, unsigned value) {
    unsigned mine = value * 3 + depth;
    if (depth == 0) return mine;
    unsigned inner = recursive(depth - 1, mine & 0xffff);
    return inner ^ mine;
}

int main(void) {
    long sum = 0;
    for (int i = 0; i < 4; i++) {
        struct packet *packet = make(i + 3, "packet");
        sum += hashed((unsigned char *)packet->name, strlen(packet->name));
        sum += distance((struct point){ i, 2 }, packet->at);
        sum += folded((struct wide){ sum, (unsigned char)(i + 4) }, (short)(i - 2), (signed char)(-i));
        sum += many(i, sum, 'a' + i, 65000 + i, -i, sum >> 3, (int)(next() & 255), 1L << (i + 30), packet);
    }
    sum += sorted(table, 8);
    sum += walked(head, BUSY) + walked(head, FAILED);
    sum += recursive(4, next() & 1023);
    printf("%ld %d\n", sum, calls);
    return 0;
}

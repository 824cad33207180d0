/* Two source files in one, by -DSECOND: structures, enumerations and variables of a name are others in each. */
#include <stdio.h>

#ifndef SECOND
struct node { int id; char tag; };
enum state { IDLE = 1, BUSY = 2 };
static int counter = 111;
struct held { struct node *node; };
__attribute__((noipa)) int first(struct node *n, enum state s) { counter++; return n->id + s; }
__attribute__((noipa)) int call_first(int n) { struct node node = { n, 't' }; struct held held = { &node }; return first(held.node, BUSY); }
#else
struct node { double pad[3]; int id; char *name; };
enum state { STOPPED = 1, RUNNING = 2 };
static int counter = 222;
int call_first(int n);
__attribute__((noipa)) int second(struct node *n, enum state s) { counter++; return n->id + s; }
__attribute__((noipa)) int plain(void *n, int s) { __asm__ volatile("" : : "r"(n) : "memory"); return s; }
int main(void) {
    struct node node = { { 0 }, 77, "named" };
    printf("%d\n", call_first(55) + second(&node, RUNNING) + plain(&node, 1) + counter);
    return 0;
}
#endif

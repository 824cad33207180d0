int far_calls;
int far(int n) { far_calls++; return n + 1; }
static int chosen(int n) { far_calls++; return n * 3; }
static int (*resolve(void))(int) { return chosen; }
int picked(int n) __attribute__((ifunc("resolve")));

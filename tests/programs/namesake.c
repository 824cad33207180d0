// A function that another file has too: with -DOTHER the other file.
static int kept = 3;
static __attribute__((noinline)) int namesake(int x) { return x + kept++; }
#ifdef OTHER
int other(int x) { return namesake(x); }
#else
int other(int x);
int main(int argc, char **argv) { (void)argv; return namesake(argc) + other(argc) + namesake(2) == 0; }
#endif

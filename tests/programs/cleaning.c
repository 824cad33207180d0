/* A patch for replaced.c with a table of exceptions: clean() is called if one passes. */
extern long orig_work(long x);

__attribute__((noinline)) static void clean(long *place)
{
	__asm__ volatile("" : : "r"(place) : "memory");
}

long work(long x)
{
	long sum __attribute__((cleanup(clean))) = x;
	return orig_work(sum) + 1000000;
}

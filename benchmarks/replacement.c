/* Patches for called.c: "hot" counts its calls, as the replacement by Frida does, and "same" calls the original. */
extern void orig_hot(long a, long b, long c, long d);
static volatile long calls;

void hot(long a, long b, long c, long d)
{
	calls++;
}

void same(long a, long b, long c, long d)
{
	orig_hot(a, b, c, d);
}

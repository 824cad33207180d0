/*
 * sampled: print the addresses of `spin` and of the end of it, then stay there for ever.
 */
#include <stdio.h>

__attribute__((noinline, noclone)) void spin(void)
{
	for (;;)
		__asm__ volatile("" : : : "memory");
}

__attribute__((noinline, noclone)) void behind(void)
{
	__asm__ volatile("" : : : "memory");
}

int main(void)
{
	printf("%p\n", (void *)spin);
	fflush(stdout);
	spin();
	behind();
	return 0;
}

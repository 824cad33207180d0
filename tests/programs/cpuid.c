/* cpuid LEAF...: prints eax, ebx, ecx and edx of each leaf, in hexadecimal. */
#include <cpuid.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		unsigned a, b, c, d;

		__cpuid_count(strtoul(argv[i], NULL, 0), 0, a, b, c, d);
		printf("%x %x %x %x\n", a, b, c, d);
	}
	return 0;
}

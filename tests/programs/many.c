/*
 * many ROUNDS [wait]: calls each of 10 000 functions, many_0 to many_9999, ROUNDS times, and prints the sum of their
 * results. With "wait" it prints "ready" and waits for the end of its input first.
 */
#include <stdio.h>
#include <stdlib.h>

#define COUNT 10000

__asm__(".altmacro\n"
	".macro many_function n\n"
	".globl many_\\n\n"
	".type many_\\n, @function\n"
	"many_\\n:\n"
#ifdef __x86_64__
	"	lea \\n(%rdi), %rax\n"
#else
	"	mov 4(%esp), %eax\n"
	"	add $\\n, %eax\n"
#endif
	"	ret\n"
	".size many_\\n, . - many_\\n\n"
	".pushsection .data.rel.ro, \"aw\"\n"
#ifdef __x86_64__
	"	.quad many_\\n\n"
#else
	"	.long many_\\n\n"
#endif
	".popsection\n"
	".endm\n"
	".pushsection .data.rel.ro, \"aw\"\n"
	".balign 8\n"
	".globl table\n"
	"table:\n"
	".popsection\n"
	".pushsection .text.many, \"ax\"\n"
	".set counter, 0\n"
	".rept 10000\n"
	"	many_function %counter\n"
	"	.set counter, counter + 1\n"
	".endr\n"
	".popsection\n");

extern long (*const table[COUNT])(long);

int main(int argc, char **argv)
{
	long sum = 0;

	if (argc > 2) {
		puts("ready");
		fflush(stdout);
		while (getchar() != EOF)
			;
	}
	for (int round = 0; round < atoi(argv[1]); round++)
		for (int n = 0; n < COUNT; n++)
			sum += table[n](round);
	printf("%ld\n", sum);
	return 0;
}

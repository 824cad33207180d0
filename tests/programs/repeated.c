/* repeated COUNT: copy so many bytes with a repeated string instruction at the label "copying". */
#include <stdlib.h>

static char from[1 << 16], to[1 << 16];

int main(int argc, char **argv)
{
	char *destination = to, *source = from;
	unsigned long count = argc > 1 ? strtoul(argv[1], 0, 0) : 0;

	__asm__ volatile(".globl copying\n.type copying, @function\ncopying: rep movsb\n.size copying, . - copying"
			 : "+D"(destination), "+S"(source), "+c"(count)
			 :
			 : "memory");
	return count != 0;
}

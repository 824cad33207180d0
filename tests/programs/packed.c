/* packed N: calls N times what strip leaves no names of; packed -: once for each byte of its input. */
#include <stdlib.h>
#include <unistd.h>

#define OPAQUE __attribute__((noipa))

static volatile int packed_total = 1000;

OPAQUE static int packed_leaf(int n)
{
	packed_total += n;
	return packed_total;
}

OPAQUE static int packed_tail(int n)
{
	return packed_leaf(n * 2);
}

OPAQUE static void packed_loop(int n)
{
	while (n-- > 0)
		packed_total ^= n & 1;
}

/* It begins with an instruction of one byte that may be any other one without an effect. */
void packed_byte(void) __attribute__((visibility("hidden")));
__asm__(".text\n.type packed_byte, @function\npacked_byte: nop\n ret\n.size packed_byte, . - packed_byte");

int main(int argc, char **argv)
{
	int is_fed = argc > 1 && argv[1][0] == '-';
	int n = argc > 1 ? atoi(argv[1]) : 3;
	char byte;

	for (int i = 0; is_fed ? read(0, &byte, 1) == 1 : i < n; i++) {
		packed_tail(i);
		packed_loop(i);
		packed_byte();
		if (is_fed)
			write(1, "\n", 1);
	}
	return 0;
}

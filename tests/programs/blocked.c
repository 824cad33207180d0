/* blocked: reads bytes by a system call instruction of its own, at a label, and says of each that it has come. */
#include <stdio.h>

long read_byte(int file, char *to);
__asm__(".globl read_byte\n.type read_byte, @function\nread_byte: xor %eax, %eax\nmov $1, %edx\n"
	".globl site_read\n.type site_read, @function\nsite_read: syscall\nret\n.size read_byte, . - read_byte\n"
	".size site_read, . - site_read");

int main(void)
{
	char byte;
	setvbuf(stdout, NULL, _IONBF, 0);
	while (read_byte(0, &byte) == 1)
		printf("%c\n", byte);
	return 0;
}

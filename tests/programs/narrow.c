/* Calls code of 32 bits in a program of 64, by a far call, as often as the argument says; the sums must be right. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

unsigned long call_narrow(unsigned long n);
unsigned long low_stack, own_stack;

__asm__(".text\n.globl narrow\n.type narrow, @function\nnarrow: .code32\npush %ebp\nmov %esp, %ebp\n"
	"lea 1(%eax,%eax,2), %eax\npop %ebp\nlret\n.code64\n.size narrow, . - narrow\n"
	".globl call_narrow\n.type call_narrow, @function\ncall_narrow: push %rbx\npush %rbp\nmov %rsp, own_stack(%rip)\n"
	"mov %rdi, %rax\nmov low_stack(%rip), %rsp\nlcall *where(%rip)\nmov own_stack(%rip), %rsp\npop %rbp\npop %rbx\n"
	"ret\n.size call_narrow, . - call_narrow\n.data\n.balign 8\nwhere: .long narrow\n.word 0x23\n.text\n");

int main(int argc, char **argv)
{
	unsigned long count = argc > 1 ? strtoul(argv[1], NULL, 0) : 100;
	char *stack = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);

	low_stack = (unsigned long)stack + 60000;
	for (unsigned long n = 0; n < count; n++)
		if ((unsigned)call_narrow(n) != (unsigned)(3 * n + 1))
			return 1;
	puts("right");
	return 0;
}

/*
 * Executes an instruction with the registers and the memory that standard input says, as often as it says so.
 *
 * First it prints the address of each of its sites, of `nop's and of `mov's. Then it reads a struct hit with its pages,
 * goes through the site, and writes a `y'; or an `n' if it cannot have the pages. Between the site and the stub's end
 * nothing touches the stack, which is where it was told.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096
#define PAGES 8
#define SITES "16"

/* Flags, then the general registers in the order in which the stub takes them, the stack pointer last. */
#ifdef __x86_64__
#define REGISTERS 17
#define WORD ".quad"
#define SAVED "saved(%rip)"
#define SAVE \
	"push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15; pushf\n" \
	"mov %rsp, " SAVED "; mov %rdi, %rsp\n"
#define TAKE \
	"popf; pop %rax; pop %rbx; pop %rcx; pop %rdx; pop %rsi; pop %rdi; pop %rbp; pop %r8; pop %r9\n" \
	"pop %r10; pop %r11; pop %r12; pop %r13; pop %r14; pop %r15; pop %rsp\n"
#define RESTORE \
	"mov " SAVED ", %rsp; popf; pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx; ret\n"
#else
#define REGISTERS 9
#define WORD ".long"
#define SAVED "saved"
#define SAVE \
	"mov 4(%esp), %eax; push %ebx; push %ebp; push %esi; push %edi; pushf\n" \
	"mov %esp, " SAVED "; mov %eax, %esp\n"
#define TAKE "popf; pop %eax; pop %ebx; pop %ecx; pop %edx; pop %esi; pop %edi; pop %ebp; pop %esp\n"
#define RESTORE "mov " SAVED ", %esp; popf; pop %edi; pop %esi; pop %ebp; pop %ebx; ret\n"
#endif

asm("	.text\n"
    "	.macro stub site:vararg\n"
    "1:	" SAVE TAKE
    "2:	\\site\n" RESTORE
    "	.pushsection .data.rel, \"aw\"\n"
    "	" WORD " 1b, 2b\n"
    "	.popsection\n"
    "	.endm\n"
    "	.pushsection .data.rel, \"aw\"\n"
    "	.balign 16\n"
    "stubs:\n"
    "	.popsection\n"
    "	.globl first_site\n"
    "	stub first_site: nop\n"
    "	stub mov %eax, %eax\n"
    "	.rept " SITES "-1\n"
    "	stub nop\n"
    "	stub mov %eax, %eax\n"
    "	.endr\n"
    "	.pushsection .data.rel, \"aw\"\n"
    "	" WORD " 0\n"
    "	.popsection\n"
    "	.local saved\n"
    "	.comm saved, 8, 8\n");

extern struct {
	void (*enter)(unsigned long *registers);
	uintptr_t site;
} stubs[];

struct hit {
	uint64_t registers[REGISTERS];
	uint32_t site, pages;
};

struct page {
	uint64_t address, read_only;
	unsigned char data[PAGE];
};

static int take(void *buffer, size_t size)
{
	return fread(buffer, size, 1, stdin) == 1;
}

static int map(const struct page *page)
{
	void *address = (void *)(uintptr_t)page->address;
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;

	if (mmap(address, PAGE, PROT_READ | PROT_WRITE, flags, -1, 0) != address)
		return 0;
	memcpy(address, page->data, PAGE);
	return !page->read_only || !mprotect(address, PAGE, PROT_READ);
}

int main(void)
{
	static struct page pages[PAGES];
	struct hit hit;

	for (int n = 0; stubs[n].enter; n++)
		printf("%lx ", (unsigned long)stubs[n].site);
	printf("\n");
	fflush(stdout);
	while (take(&hit, sizeof hit) && hit.pages <= PAGES) {
		unsigned long registers[REGISTERS];
		unsigned mapped = 0;

		for (int n = 0; n < REGISTERS; n++)
			registers[n] = hit.registers[n];
		if (hit.pages && !take(pages, hit.pages * sizeof *pages))
			return 1;
		while (mapped < hit.pages && map(&pages[mapped]))
			mapped++;
		putchar(mapped == hit.pages ? 'y' : 'n');
		if (mapped == hit.pages)
			stubs[hit.site].enter(registers);
		while (mapped)
			munmap((void *)(uintptr_t)pages[--mapped].address, PAGE);
		fflush(stdout);
	}
	return 0;
}

/*
 * puppet [report]: executes an instruction with the registers and the memory that standard input says, as often as it
 * says so.
 *
 * First it prints the address of each of its sites, of one, two and more than five bytes in turns. Then it reads a struct
 * hit with its pages, goes through the site, and writes a `y'; or an `n' if it cannot have the pages. With an argument it
 * also writes the registers and the pages as they are then. Between the site and the stub's end nothing touches the
 * stack, which is where it was told.
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
#define REPORT \
	"mov %rsp, behind-8(%rip); lea behind-8(%rip), %rsp; push %r15; push %r14; push %r13; push %r12; push %r11\n" \
	"push %r10; push %r9; push %r8; push %rbp; push %rdi; push %rsi; push %rdx; push %rcx; push %rbx; push %rax; pushf\n"
#define RESTORE \
	REPORT "mov " SAVED ", %rsp; popf; pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx; ret\n"
#define LONG "{disp32} lea 0(%rax), %rax"
#else
#define REGISTERS 9
#define WORD ".long"
#define SAVED "saved"
#define SAVE \
	"mov 4(%esp), %eax; push %ebx; push %ebp; push %esi; push %edi; pushf\n" \
	"mov %esp, " SAVED "; mov %eax, %esp\n"
#define TAKE "popf; pop %eax; pop %ebx; pop %ecx; pop %edx; pop %esi; pop %edi; pop %ebp; pop %esp\n"
#define REPORT \
	"mov %esp, behind-4; mov $behind-4, %esp; push %ebp; push %edi; push %esi; push %edx; push %ecx; push %ebx\n" \
	"push %eax; pushf\n"
#define RESTORE REPORT "mov " SAVED ", %esp; popf; pop %edi; pop %esi; pop %ebp; pop %ebx; ret\n"
#define LONG "{disp32} lea 0(%eax), %eax"
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
    "	.type stubs_code, @function\n"
    "stubs_code:\n"
    "	.cfi_startproc\n"
    "	stub first_site: nop\n"
    "	stub mov %eax, %eax\n"
    "	stub " LONG "\n"
    "	.rept " SITES "-1\n"
    "	stub nop\n"
    "	stub mov %eax, %eax\n"
    "	stub " LONG "\n"
    "	.endr\n"
    "	.cfi_endproc\n"
    "	.size stubs_code, . - stubs_code\n"
    "	.pushsection .data.rel, \"aw\"\n"
    "	" WORD " 0\n"
    "	.popsection\n"
    "	.local saved\n"
    "	.comm saved, 8, 8\n"
    "	.bss\n"
    "	.balign 16\n"
    "reported: .space 17 * 8\n"
    "behind:\n"
    "	.data\n"
    "	.globl data, table, \"Buffer.cold\", \"operator new[]\"\n"
    "data: table: \"Buffer.cold\": \"operator new[]\": .space 64\n"
    "	.text\n");

/* What was there behind a site ends here: in the order of a hit's registers. */
extern unsigned char behind[];

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

static void report(const struct page *pages, unsigned count)
{
	fwrite(behind - REGISTERS * sizeof(long), sizeof(long), REGISTERS, stdout);
	for (unsigned n = 0; n < count; n++)
		fwrite((void *)(uintptr_t)pages[n].address, PAGE, 1, stdout);
}

int main(int argc, char **argv)
{
	static struct page pages[PAGES];
	struct hit hit;

	(void)argv;

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
		if (mapped == hit.pages && argc > 1)
			report(pages, mapped);
		while (mapped)
			munmap((void *)(uintptr_t)pages[--mapped].address, PAGE);
		fflush(stdout);
	}
	return 0;
}

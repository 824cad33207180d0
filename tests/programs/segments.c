/*
 * segments [ldt [filtered]]: for an i386 program. Calls convert(), fetch() and store() with selectors and offsets of all kinds, and
 * prints for each the segment's base and what the processor itself makes of them: the byte that it reads there, the 4
 * bytes that it reads there, the 2 bytes that are there after store(), and whether it can write 2 bytes; "gp" is a segment
 * fault, "pf" a page fault. Then at `loading' each selector is to be put into fs by a handler; prints what fs is behind
 * that, and the 4 bytes at its offset 4. "filtered" is with a seccomp filter, which allows everything.
 */
#define _GNU_SOURCE
#include <asm/ldt.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static unsigned char data[4 * 4096] __attribute__((aligned(4096)));
static sigjmp_buf back;
static volatile int sink;
static int count;

static struct {
	const char *name;
	unsigned selector, base;
} segments[32];

__attribute__((noinline, noclone)) void convert(unsigned selector, unsigned offset)
{
	sink += selector + offset;
}

__attribute__((noinline, noclone)) void fetch(unsigned selector, unsigned offset)
{
	sink += selector - offset;
}

__attribute__((noinline, noclone)) void store(unsigned selector, unsigned offset)
{
	sink += selector ^ offset;
}

static void add(const char *name, unsigned selector, unsigned base)
{
	segments[count].name = name;
	segments[count].selector = selector;
	segments[count++].base = base;
}

static struct user_desc describe(unsigned base, unsigned limit)
{
	struct user_desc d;

	memset(&d, 0, sizeof(d));
	d.base_addr = base;
	d.limit = limit;
	d.seg_32bit = 1;
	return d;
}

static void thread_area(const char *name, struct user_desc d)
{
	d.entry_number = -1;
	if (syscall(SYS_set_thread_area, &d))
		printf("no thread area for %s\n", name);
	add(name, d.entry_number << 3 | 3, d.base_addr);
}

static void local(const char *name, int entry, struct user_desc d)
{
	d.entry_number = entry;
	if (syscall(SYS_modify_ldt, 0x11, &d, sizeof(d)))
		printf("no local descriptor for %s\n", name);
	add(name, entry << 3 | 7, d.base_addr);
}

static void on_fault(int number, siginfo_t *info, void *context)
{
	(void)context;
	siglongjmp(back, number == SIGSEGV && info->si_code != SI_KERNEL ? 2 : 1);
}

static void report(unsigned selector, unsigned offset, char kind)
{
	static const char *const names[] = { "", "gp", "pf" };
	unsigned value = 0;
	int fault = sigsetjmp(back, 1);

	if (fault == 0) {
		__asm__ volatile("mov %0, %%fs" : : "r"(selector));
		switch (kind) {
		case 'b':
			__asm__ volatile("movzbl %%fs:(%1), %0" : "=r"(value) : "r"(offset));
			break;
		case 'd':
			__asm__ volatile("movl %%fs:(%1), %0" : "=r"(value) : "r"(offset));
			break;
		case 'w':
			__asm__ volatile("movw %w1, %%fs:(%0)" : : "r"(offset), "r"(0x4443) : "memory");
			break;
		}
	}
	__asm__ volatile("mov %0, %%fs" : : "r"(0));
	if (fault)
		printf(" %s", names[fault]);
	else
		printf(" %u", value);
}

static void show(unsigned address)
{
	if (address >= (unsigned)data && address < (unsigned)(data + sizeof(data) - 1))
		printf(" %u", *(unsigned short *)address);
	else
		printf(" -");
}

int main(int argc, char **argv)
{
	static const unsigned offsets[] = { 0, 8, 12, 13, 14, 15, 16, 4092, 4093, 4094, 4095, 4096, 65532, 65534, 65536,
		0xfffffffc, 0xffffffff };
	struct user_desc d, data_at = describe((unsigned)data, 15);
	struct sigaction action;
	unsigned selector;

	memset(&action, 0, sizeof(action));
	action.sa_sigaction = on_fault;
	action.sa_flags = SA_SIGINFO;
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	for (unsigned i = 0; i < sizeof(data); i++)
		data[i] = i * 7 + 1;
	__asm__("mov %%ds, %0" : "=r"(selector));
	add("ds", selector & 0xffff, 0);
	__asm__("mov %%cs, %0" : "=r"(selector));
	add("cs", selector & 0xffff, 0);
	add("null", 0, 0);
	add("null-3", 3, 0);
	add("kernel", 0x10, 0);
	add("unknown", 0x7ff8 | 3, 0);
	add("local-unknown", 0x7ff8 | 7, 0);
	thread_area("area", data_at);
	d = describe((unsigned)data, 0);
	d.limit_in_pages = d.read_exec_only = 1;
	thread_area("area-read-only", d);
	if (argc > 1 && !strcmp(argv[1], "ldt")) {
		local("local", 0, data_at);
		d = data_at;
		d.contents = 2;
		local("local-code", 1, d);
		d.read_exec_only = 1;
		local("local-execute-only", 2, d);
		d = data_at;
		d.seg_not_present = 1;
		local("local-not-present", 3, d);
		d = describe((unsigned)data - 4096, 4095);
		d.contents = 1;
		local("local-expand-down", 4, d);
		d.seg_32bit = 0;
		local("local-expand-down-16", 5, d);
		local("local-pages", 700, describe((unsigned)data, 4095));
		add("local-beyond", 701 << 3 | 7, 0);
	}
	if (argc > 2) {
		struct sock_filter all = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
		struct sock_fprog filter = { 1, &all };

		if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter))
			return 1;
	}
	for (int i = 0; i < count; i++)
		for (unsigned j = 0; j < sizeof(offsets) / sizeof(*offsets); j++) {
			convert(segments[i].selector, offsets[j]);
			fetch(segments[i].selector, offsets[j]);
			printf("%s %u %u %u", segments[i].name, segments[i].selector, segments[i].base, offsets[j]);
			report(segments[i].selector, offsets[j], 'b');
			report(segments[i].selector, offsets[j], 'd');
			store(segments[i].selector, offsets[j]);
			show(segments[i].base + offsets[j]);
			report(segments[i].selector, offsets[j], 'w');
			printf("\n");
		}
	for (int i = 0; i < count; i++) {
		unsigned found = 0;

		__asm__ volatile(".globl loading\nloading: nop\n\tmov %%fs, %0" : "=&r"(found) : "b"(segments[i].selector));
		printf("load %s %u %u", segments[i].name, segments[i].selector, found & 0xffff);
		report(found & 0xffff, 4, 'd');
		__asm__ volatile("mov %0, %%fs" : : "r"(0));
		printf("\n");
	}
	return 0;
}

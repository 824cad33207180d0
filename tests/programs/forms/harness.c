/*
 * forms [NAME|- [seccomp|full|apart|waiting]]: execute each instruction form of the generated table from several initial states, and print a line
 * for each: name, runs, signals, faults of the instruction itself, and a digest of everything that it may change. With a NAME, print that
 * form's states in full instead. Freestanding, at fixed addresses: two runs differ in nothing but the system's answers.
 * With "apart" each form has a process of its own, and another line says whether the kernel has stepped an instruction for a uprobe.
 *
 * A form runs from enter_form to leave_form (enter64.S, enter32.S), with its stack and its data in the arena. A fault
 * is noted with everything the handler is told, and ends the form.
 */
#define _GNU_SOURCE
#define _LARGEFILE64_SOURCE
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <ucontext.h>

#define SEEDS 5
#define ARENA 0x20000000ul
#define ARENA_SIZE 0x34000
#define STACK (ARENA + 0x2000)
#define RED_ZONE 128
#define SPENT 0x800 /* below the red zone: what handlers in the process may write on */
#define FS_AREA (ARENA + 0x8000)
#define GS_AREA (ARENA + 0x9000)
#define NEAR_SIZE 4096
#define X_SIZE 4096
#define X_HEADER 512 /* of an XSAVE area: what is not state */

struct form {
	const char *name;
	void (*entry)(void);
	unsigned long site;
};

#define HIDDEN __attribute__((visibility("hidden")))

extern const struct form forms[] HIDDEN;
extern void enter_form(void) HIDDEN, leave_form(void) HIDDEN, on_signal_entry(void) HIDDEN, restorer(void) HIDDEN;

#ifdef __x86_64__
enum { GENERAL = 16 };
static const char *const names[] = { "ax", "cx", "dx", "bx", "sp", "bp", "si", "di",
				     "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15" };
#else
enum { GENERAL = 8 };
static const char *const names[] = { "ax", "cx", "dx", "bx", "sp", "bp", "si", "di" };
#endif
static const char *const selectors[] = { "cs", "ss", "ds", "es", "fs", "gs" };

/* The order of the general registers is that of their numbers in instructions. */
HIDDEN unsigned long in_registers[GENERAL], in_flags, out_registers[GENERAL], out_flags, kept_sp, own_pid;
HIDDEN uint32_t x_mask, out_selectors[6];
HIDDEN void (*entry)(void);
HIDDEN unsigned char in_x[X_SIZE] __attribute__((aligned(64))), out_x[X_SIZE] __attribute__((aligned(64)));
HIDDEN unsigned char near_data[NEAR_SIZE] __attribute__((aligned(4096)));

/* What "eip + distance" means where the program is above 4 GiB. */
static unsigned char *near_copy;

static unsigned char arena_before[ARENA_SIZE], near_before[NEAR_SIZE], signal_stack[1 << 16];
static int details, apart, in_form, signals, faults;
static unsigned long site;
static uint64_t digest;
static int shares_stack;

long system_call(long number, long a, long b, long c, long d, long e, long f);

#ifdef __x86_64__
long system_call(long number, long a, long b, long c, long d, long e, long f)
{
	register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
	long result;
	__asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return result;
}
#endif

/* Output */

static char output[1 << 16];
static size_t filled;

static void flush(void)
{
	for (size_t done = 0; done < filled;) {
		long n = system_call(SYS_write, 1, (long)(output + done), filled - done, 0, 0, 0);
		if (n <= 0)
			break;
		done += n;
	}
	filled = 0;
}

static void text(const char *s)
{
	for (; *s; s++) {
		if (filled == sizeof output)
			flush();
		output[filled++] = *s;
	}
}

static void hex(uint64_t value)
{
	char digits[17], *p = digits + 16;

	*p = 0;
	do
		*--p = "0123456789abcdef"[value & 15];
	while (value >>= 4);
	text(p);
}

static void field(const char *name, uint64_t value)
{
	text(" ");
	text(name);
	text("=");
	hex(value);
}

static void stop(const char *why)
{
	text(why);
	text("\n");
	flush();
	system_call(SYS_exit_group, 2, 0, 0, 0, 0, 0);
}

/* Numbers and digests */

static uint64_t random_state;

static uint64_t next_random(void) /* splitmix64 */
{
	uint64_t z = random_state += 0x9e3779b97f4a7c15ull;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

static void fill(void *to, size_t size)
{
	uint64_t *p = to;

	for (size_t n = 0; n < size / 8; n++)
		p[n] = next_random();
}

static void mix(uint64_t value)
{
	digest = (digest ^ value) * 0x100000001b3ull;
	digest ^= digest >> 29;
}

static void mix_all(const void *from, size_t size)
{
	const uint64_t *p = from;

	for (size_t n = 0; n < size / 8; n++)
		mix(p[n]);
}

/* A number as programs have them: often an extreme one, often a small one. */
static unsigned long number(void)
{
	static const uint64_t edges[] = { 0, 1, ~0ull, 0x7fffffffffffffffull, 0x8000000000000000ull, 0x7fffffff, 0x80000000,
					  0xffffffff };
	uint64_t choice = next_random();

	if (choice % 4 == 0)
		return (unsigned long)edges[choice / 4 % 8];
	if (choice % 4 == 1)
		return (unsigned long)(next_random() % 200);
	return (unsigned long)next_random();
}

static void copy(void *to, const void *from, size_t size)
{
	__asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
}

/* Signals */

HIDDEN void on_signal(int sig, siginfo_t *info, ucontext_t *context);

void on_signal(int sig, siginfo_t *info, ucontext_t *context)
{
	greg_t *registers = context->uc_mcontext.gregs;
#ifdef __x86_64__
	enum { IP = REG_RIP, FLAGS = REG_EFL, TRAP = REG_TRAPNO, COUNT = NGREG };
#else
	enum { IP = REG_EIP, FLAGS = REG_EFL, TRAP = REG_TRAPNO, COUNT = 19 };
#endif
	unsigned long ip = (unsigned long)registers[IP];

	if (!in_form)
		stop("a signal outside the forms");
	if (++signals > 20)
		stop("signals without end");
	mix(sig);
	mix(info->si_code);
	mix((unsigned long)info->si_addr);
	for (int n = 0; n < COUNT; n++)
		if (!apart || n != TRAP) /* which is 0 for an instruction that was stepped for a uprobe */
			mix(registers[n]);
#ifdef __i386__
	mix(context->uc_mcontext.cr2);
#endif
	if (details) {
		text("  signal");
		field("number", sig);
		field("code", (uint32_t)info->si_code);
		field("address", (unsigned long)info->si_addr);
		field("ip-site", ip - site);
		field("flags", registers[FLAGS]);
		field("trap", registers[REG_TRAPNO]);
		field("error", registers[REG_ERR]);
		text("\n  registers");
		for (int n = 0; n < COUNT; n++) {
			text(" ");
			hex((unsigned long)registers[n]);
		}
		text("\n");
	}
	faults += sig != SIGTRAP && ip == site;
	if (sig == SIGTRAP)
		registers[FLAGS] &= ~0x100; /* the form goes on without the trap flag */
	else
		registers[IP] = (greg_t)leave_form;
}

static void catch_signals(void)
{
	static const int caught[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP };
	struct {
		void (*handler)(void);
		unsigned long flags;
		void (*restorer)(void);
		uint64_t mask;
	} action = { on_signal_entry, SA_SIGINFO | SA_ONSTACK | 0x04000000, restorer, 0 };
	stack_t stack = { .ss_sp = signal_stack, .ss_size = sizeof signal_stack };

	system_call(SYS_sigaltstack, (long)&stack, 0, 0, 0, 0, 0);
	for (unsigned n = 0; n < sizeof caught / sizeof *caught; n++)
		system_call(SYS_rt_sigaction, caught[n], (long)&action, 0, 8, 0, 0);
}

/* The states */

static void map_fixed(unsigned long address, size_t size)
{
#ifdef __x86_64__
	long call = SYS_mmap;
#else
	long call = SYS_mmap2;
#endif
	long got = system_call(call, address, size, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

	if ((unsigned long)got != address)
		stop("a fixed address is taken");
}

static void find_features(void)
{
	uint32_t a, b, c, d;

	__asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(1), "c"(0));
	if (!(c & 1u << 27)) /* no XSAVE for programs: FXSAVE is used */
		return;
	__asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
	x_mask = a & 0xe7; /* x87, SSE, AVX, AVX-512; not MPX and not the protection keys */
	/* What leaf 0xd says of all components together counts those that are not saved here, such as the tiles of AMX. */
	for (unsigned component = 2; component < 8; component++) {
		if (!(x_mask >> component & 1))
			continue;
		__asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(0xd), "c"(component));
		if (b + a > X_SIZE)
			stop("the extended state is larger than expected");
	}
}

/* Give fs and gs bases of their own. */
static void set_segments(void)
{
#ifdef __x86_64__
	system_call(SYS_arch_prctl, 0x1002, FS_AREA, 0, 0, 0, 0);
	system_call(SYS_arch_prctl, 0x1001, GS_AREA, 0, 0, 0, 0);
#else
	static unsigned selector[2];
	for (int n = 0; n < 2; n++) {
		struct { unsigned entry, base, limit, flags; } area = {
			selector[n] ? selector[n] >> 3 : -1u, n ? GS_AREA : FS_AREA, 0xfff, 0x51
		};
		if (system_call(SYS_set_thread_area, (long)&area, 0, 0, 0, 0, 0))
			stop("set_thread_area failed");
		selector[n] = area.entry << 3 | 3;
	}
	__asm__ volatile("mov %0, %%fs\n mov %1, %%gs" : : "r"(selector[0]), "r"(selector[1]));
#endif
}

static void prepare(int form, int seed)
{
	random_state = (uint64_t)form << 32 | seed;
	next_random();
	fill((void *)ARENA, ARENA_SIZE);
	fill(near_data, NEAR_SIZE);
	if (near_copy)
		copy(near_copy, near_data, NEAR_SIZE);
	fill(in_x, X_SIZE);
	for (int n = 0; n < 32; n++)
		in_x[n] = 0; /* control words and pointers of the x87, no register in use */
	*(uint16_t *)in_x = 0x37f;
	*(uint32_t *)(in_x + 24) = 0x1f80 | (next_random() & 0xe000);
	*(uint32_t *)(in_x + 28) = 0;
	for (int n = 0; n < 64; n++)
		in_x[X_HEADER + n] = 0;
	*(uint32_t *)(in_x + X_HEADER) = x_mask;
	for (int n = 0; n < GENERAL; n++)
		in_registers[n] = number();
	/* Pointers into the arena, far enough from its parts' borders for small distances in both directions. */
	in_registers[3] = ARENA + 0x4800 + (seed & 1 ? 0 : 64);
	in_registers[4] = STACK + 8 * (seed % 3);
	in_registers[5] = ARENA + 0x2800 + 16 * seed;
	in_registers[6] = ARENA + 0x5000 + 64 * (seed & 1);
	in_registers[7] = ARENA + 0x5800 + 64 * (seed & 1);
#ifdef __x86_64__
	in_registers[12] = ARENA + 0x6000;
	in_registers[13] = ARENA + 0x6800;
	in_registers[14] = next_random() % 64;
#endif
	/* carry, parity, adjust, zero, sign, overflow, and in some runs the direction */
	in_flags = 0x202 | (next_random() & 0x8d5) | (seed == 1 || seed == 4 ? 0x400 : 0);
	set_segments();
	if (details) {
		copy(arena_before, (void *)ARENA, ARENA_SIZE);
		copy(near_before, near_data, NEAR_SIZE);
	}
}

static void show_changes(const char *name, const unsigned char *before, const unsigned char *after, size_t size)
{
	for (size_t n = 0; n < size; n += 8)
		if (*(const uint64_t *)(before + n) != *(const uint64_t *)(after + n)) {
			text("  ");
			text(name);
			text("+");
			hex(n);
			text(" ");
			hex(*(const uint64_t *)(before + n));
			text(" -> ");
			hex(*(const uint64_t *)(after + n));
			text("\n");
		}
}

static void note(void)
{
	unsigned long base[2] = { 0, 0 };

	/* What the kernel may lose by itself: the pointers to the last x87 instruction and its operand. */
	for (int n = 6; n < 24; n++)
		out_x[n] = 0;
	for (int n = 0; n < 64; n++) /* which states are in their initial configuration is the processor's choice */
		out_x[X_HEADER + n] = in_x[X_HEADER + n];
	for (int n = 416; n < X_HEADER; n++) /* not used, or not state */
		out_x[n] = in_x[n];
#ifdef __x86_64__
	system_call(SYS_arch_prctl, 0x1003, (long)&base[0], 0, 0, 0, 0);
	system_call(SYS_arch_prctl, 0x1004, (long)&base[1], 0, 0, 0, 0);
#endif
	for (int n = 0; n < GENERAL; n++)
		mix(out_registers[n]);
	mix(out_flags);
	for (int n = 0; n < 6; n++)
		mix(out_selectors[n]);
	mix(base[0]);
	mix(base[1]);
	mix_all(out_x, X_SIZE);
	mix_all((void *)ARENA, ARENA_SIZE);
	mix_all(near_data, NEAR_SIZE);
	if (near_copy)
		mix_all(near_copy, NEAR_SIZE);
	if (!details)
		return;
	text(" ");
	for (int n = 0; n < GENERAL; n++)
		field(names[n], out_registers[n]);
	field("flags", out_flags);
	for (int n = 0; n < 6; n++)
		field(selectors[n], out_selectors[n]);
	field("fsbase", base[0]);
	field("gsbase", base[1]);
	text("\n");
	show_changes("arena", arena_before, (void *)ARENA, ARENA_SIZE);
	show_changes("near", near_before, near_data, NEAR_SIZE);
	if (near_copy)
		show_changes("near-copy", near_before, near_copy, NEAR_SIZE);
	show_changes("x", in_x, out_x, X_SIZE);
}

static void run(int number_of, const struct form *form)
{
	int all_signals = 0;

	digest = 0xcbf29ce484222325ull;
	entry = form->entry;
	site = form->site;
	faults = 0;
	for (int seed = 0; seed < SEEDS; seed++) {
		signals = 0;
		prepare(number_of, seed);
		if (details) {
			text("seed ");
			hex(seed);
			text("\n ");
			for (int n = 0; n < GENERAL; n++)
				field(names[n], in_registers[n]);
			field("flags", in_flags);
			text("\n");
		}
		for (size_t n = 0; n < X_SIZE; n++)
			out_x[n] = in_x[n];
		in_form = 1;
		enter_form();
		in_form = 0;
		for (size_t n = shares_stack ? 0 : SPENT; n < SPENT; n++)
			((volatile unsigned char *)(in_registers[4] - RED_ZONE - SPENT))[n] = 0;
		all_signals += signals;
		note();
	}
	text(form->name);
	text(" ");
	hex(SEEDS);
	text(" ");
	hex(all_signals);
	text(" ");
	hex(faults);
	text(" ");
	hex(digest);
	text("\n");
	flush(); /* if the next form does not end, this one is known to have done so */
}

static int same(const char *a, const char *b)
{
	while (*a && *a == *b)
		a++, b++;
	return *a == *b;
}

/* Whether this process has the page in which the kernel steps instructions that carry a uprobe. */
static int has_page_for_uprobes(void)
{
	static const char wanted[] = "[uprobes]\n";
	static char maps[1 << 14];
	long size = 0, n, file = system_call(SYS_open, (long)"/proc/self/maps", 0, 0, 0, 0, 0);
	unsigned matched = 0;

	if (file < 0)
		stop("no memory map");
	while ((n = system_call(SYS_read, file, (long)(maps + size), sizeof maps - size, 0, 0, 0)) > 0)
		size += n;
	system_call(SYS_close, file, 0, 0, 0, 0, 0);
	for (n = 0; n < size && matched < sizeof wanted - 1; n++)
		matched = maps[n] == wanted[matched] ? matched + 1 : maps[n] == wanted[0];
	return matched == sizeof wanted - 1;
}

static void run_apart(int number_of, const struct form *form)
{
	long child;

	flush();
	child = system_call(SYS_fork, 0, 0, 0, 0, 0, 0);
	if (child < 0)
		stop("no process for a form");
	if (child) {
		system_call(SYS_wait4, child, 0, 0, 0, 0, 0);
		return;
	}
	system_call(SYS_alarm, 30, 0, 0, 0, 0, 0);
	own_pid = (unsigned long)system_call(SYS_getpid, 0, 0, 0, 0, 0, 0);
	run(number_of, form);
	text(form->name);
	text(has_page_for_uprobes() ? " stepped\n" : " not-stepped\n");
	flush();
	system_call(SYS_exit_group, 0, 0, 0, 0, 0, 0);
}

/* Make it harder for a debugger to have memory mapped: by a filter of system calls, or by a limit that is reached; or
 * give it time until there is a byte to read, and leave it the stack below the red zone. */
static void restrict_memory(const char *how)
{
	static struct sock_filter allow[] = { BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
	static struct sock_fprog program = { 1, allow };
	static struct rlimit64 limit = { 1 << 16, 1 << 16 };
	static char byte;
	long result = 0;

	shares_stack = same(how, "waiting");
	if (shares_stack)
		result = system_call(SYS_read, 0, (long)&byte, 1, 0, 0, 0) != 1;
	else if (same(how, "seccomp")) {
		system_call(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0);
		result = system_call(SYS_prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, (long)&program, 0, 0, 0);
	} else if (same(how, "full"))
		result = system_call(SYS_prlimit64, 0, RLIMIT_AS, (long)&limit, 0, 0, 0);
	if (result)
		stop("the restriction failed");
}

HIDDEN void start(unsigned long *stack);

void start(unsigned long *stack)
{
	const char *wanted = stack[0] > 1 ? (const char *)stack[2] : 0;

	own_pid = (unsigned long)system_call(SYS_getpid, 0, 0, 0, 0, 0, 0);
	find_features();
	map_fixed(ARENA, ARENA_SIZE);
#ifdef __x86_64__
	if ((unsigned long)near_data >> 32) {
		near_copy = (unsigned char *)(unsigned long)(uint32_t)(unsigned long)near_data;
		map_fixed((unsigned long)near_copy, NEAR_SIZE);
	}
#endif
	catch_signals();
	apart = stack[0] > 2 && same((const char *)stack[3], "apart");
	if (stack[0] > 2 && !apart)
		restrict_memory((const char *)stack[3]);
	if (wanted && same(wanted, "-"))
		wanted = 0;
	details = wanted != 0;
	for (int n = 0; forms[n].name; n++)
		if (!wanted || same(wanted, forms[n].name))
			(apart ? run_apart : run)(n, &forms[n]);
	flush();
	system_call(SYS_exit_group, 0, 0, 0, 0, 0, 0);
}

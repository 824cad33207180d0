/* A patch for replaced.c that is refused, for the reason that -DREASON_... selects. */
long table[4];

#if defined REASON_CONSTRUCTOR
__attribute__((constructor)) static void begin(void)
{
	table[0] = 1;
}
#elif defined REASON_DESTRUCTOR
__attribute__((destructor)) static void end(void)
{
	table[0] = 1;
}
#elif defined REASON_CODE
__asm__(".text\n.quad table\n");
#elif defined REASON_THREAD
static __thread long own;
#elif defined REASON_FOREIGN_THREAD
extern __thread long of_program;
#elif defined REASON_CHOSEN
static long first(void)
{
	return 1;
}
static long (*choose(void))(void)
{
	return first;
}
__attribute__((ifunc("choose"))) long chosen_here(void);
#elif defined REASON_KIND
__asm__(".data\n.quad table@SIZE\n.text\n");
#elif defined REASON_WRITABLE
__asm__(".section .both, \"awx\"\n.quad 0\n.text\n");
#elif defined REASON_PACKED
static long packed[2];
long *places[] = {packed, packed + 1};
#elif defined REASON_MISSING
extern long nowhere(void);
#elif defined REASON_AMBIGUOUS
extern long table_size;
#elif defined REASON_PROGRAM_CHOOSES
extern long chosen(long x);
#elif defined REASON_BUILD
__attribute__((section(".dprobes.build-id"), used)) static const char made_for[] = "0123456789abcdef";
#endif

long work(long x)
{
#if defined REASON_THREAD
	return own++ + x;
#elif defined REASON_FOREIGN_THREAD
	return of_program + x;
#elif defined REASON_CHOSEN
	return chosen_here() + x;
#elif defined REASON_MISSING
	return nowhere() + x;
#elif defined REASON_AMBIGUOUS
	return table_size + x;
#elif defined REASON_PROGRAM_CHOOSES
	return chosen(x);
#else
	return x;
#endif
}

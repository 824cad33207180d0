/* Patches for replaced.c. */
#include <string.h>

extern long orig_work(long x);
extern char word[16];
extern long other_size __asm__("\"named_twice.c:table_size\"");
static long calls;
static long *const counted = &calls; /* a relocation of data */

long work(long x)
{
	++*counted;
	return orig_work(x) + 1000000;
}

/* Patches of work() that show in which order they were called. */
long doubled(long x)
{
	return 2 * orig_work(x);
}

long increased(long x)
{
	return orig_work(x) + 10;
}

long unchanged(long x)
{
	return orig_work(x);
}

size_t length(const char *text)
{
	return text == word ? 100 + strlen(text) : 0; /* strlen is an IFUNC in glibc */
}

long padded(void)
{
	return 7;
}

long spread(long x)
{
	return x;
}

long uses_spread(long x)
{
	return x + other_size * 1000;
}

extern char *orig_next_line(char *line, int size);

char *next_line(char *line, int size)
{
	char *found = orig_next_line(line, size);
	return found && line[0] == 'q' ? 0 : found;
}

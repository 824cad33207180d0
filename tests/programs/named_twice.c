/* Another part of replaced.c, with a static variable of the same name as one there. */
static volatile long table_size = 77;

long other_part(void)
{
	return table_size;
}

/* getpids COUNT: calls the library's getpid() COUNT times. */
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	int right = 1;

	for (int n = 0; argc > 1 && n < atoi(argv[1]); n++)
		right &= getpid() > 0;
	return !right;
}

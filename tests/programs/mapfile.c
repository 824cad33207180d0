/* mapfile FILE: map the file as code, print where, and wait for the end of the input. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	struct stat status;
	int file = argc > 1 ? open(argv[1], O_RDONLY) : -1;
	void *code;
	char c;

	if (file < 0 || fstat(file, &status))
		return 1;
	code = mmap(0, status.st_size, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0);
	if (code == MAP_FAILED)
		return 1;
	printf("%lx\n", (unsigned long)code);
	fflush(stdout);
	return read(0, &c, 1) < 0;
}

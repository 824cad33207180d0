/*
 * Loaded before others, lets the process that restores what a killed tracer leaves begin only when the file that BEGUN
 * names is there, or after six seconds.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

__attribute__((constructor)) static void begin_late(void)
{
	char line[4096] = "";
	int file = open("/proc/self/cmdline", O_RDONLY);
	ssize_t size = read(file, line, sizeof line - 1);
	close(file);
	for (ssize_t n = 0; n < size; n++)
		if (!line[n])
			line[n] = ' ';
	if (strstr(line, ".restorer_process "))
		for (int n = 0; n < 600 && access(getenv("BEGUN"), F_OK); n++)
			usleep(10000);
}

/* lookup: look up a name for each line of input. */
#include <netdb.h>
#include <stdio.h>

int main(void)
{
	char line[16];

	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin)) {
		struct addrinfo *found = 0;

		printf("%d\n", getaddrinfo("127.0.0.77", "80", 0, &found) == 0);
		fflush(stdout);
		if (found)
			freeaddrinfo(found);
	}
	return 0;
}

/* waiting: wait for the end of the input, and throw. */
#include <cstdio>
#include <unistd.h>

int main()
{
	char c;

	std::puts("ready");
	std::fflush(stdout);
	try {
		if (read(0, &c, 1) == 0)
			throw 1;
	} catch (int) {
		return 0;
	}
	return 1;
}

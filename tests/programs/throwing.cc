/* throwing: an exception passes through "passed", and is caught. */
#include <cstdio>

extern "C" __attribute__((noipa)) int thrower(int n)
{
	if (n)
		throw n;
	return 0;
}

extern "C" __attribute__((noipa)) int passed(int n)
{
	int result = thrower(n) + 1;

	asm volatile("");
	return result;
}

int main()
{
	try {
		passed(3);
	} catch (int n) {
		std::printf("caught %d\n", n);
	}
	return 0;
}

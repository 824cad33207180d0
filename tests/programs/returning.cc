/* returning: "passed" hands over to another function, which returns three times and throws once. */
#include <cstdio>

extern "C" __attribute__((noipa)) int thrower(int n)
{
	if (n == 3)
		throw n;
	return n;
}

extern "C" __attribute__((noipa)) int passed(int n)
{
	return thrower(n);
}

int main()
{
	try {
		for (int n = 0; n < 10; n++)
			passed(n);
	} catch (int n) {
		std::printf("caught %d\n", n);
	}
	return 0;
}

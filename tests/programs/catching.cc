/* Patches for pricing.cc. */
#include <stdexcept>

extern "C" int orig_price(int n, double factor);

struct Depth {
	int *depth;
	~Depth() { --*depth; }
};

/* Catches the exceptions of the original; a destructor runs as well. The second argument is in a vector register. */
extern "C" int price(int n, double factor)
{
	int depth = 1;
	int found = 0;
	try {
		Depth guard{&depth};
		found = orig_price(n, factor + 1);
	} catch (const std::runtime_error &) {
		return 1000 + depth;
	}
	return found;
}

/* Throws an exception of its own, and lets that of the original pass. */
extern "C" int strict(int n, double factor)
{
	int depth = 1;
	Depth guard{&depth};
	if (n < 100)
		throw std::runtime_error("too few");
	return orig_price(n, factor);
}

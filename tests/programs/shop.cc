/* shop: functions of C++ of all kinds, each called as often as it prints. */
#include <cstdio>
#include <string>

#define OPAQUE __attribute__((noipa))

namespace shop {

struct Cart {
	int total;
	explicit OPAQUE Cart(int start) : total(start) {}
	OPAQUE ~Cart() {}
	OPAQUE int add(int n) { return total += n; }
	OPAQUE int add(const char *text) { return total += text[0]; }
	OPAQUE int size() const { return total; }
	OPAQUE int operator()(int n) { return n + total; }
	OPAQUE Cart &operator+=(int n) { total += n; return *this; }
};

namespace {
OPAQUE int hidden(int n) { return n + 1; }
}

template <class T> OPAQUE T twice(T x) { return x + x; }

template <class T> struct Box {
	T value;
	OPAQUE T get() { return value; }
};

int counter = 5;

}

OPAQUE int lone(int n, char *text) { return n + text[0]; }

int main()
{
	shop::Cart cart(1);
	shop::Box<std::string> text{"q"};
	shop::Box<int> number{3};
	char letter[] = "a";

	cart.add(2);
	cart.add(3);
	cart.add("x");
	cart += 4;
	std::printf("size %d, called %d\n", cart.size(), cart(3));
	std::printf("hidden %d twice %d %g lone %d\n", shop::hidden(1), shop::twice(2), shop::twice(2.5), lone(1, letter));
	std::printf("boxes %s %d counter %d\n", text.get().c_str(), number.get(), shop::counter);
	return 0;
}

/* A line of input makes it print a price, which a method of a class computes. */
#include <iostream>
#include <string>

class Shop {
public:
	explicit Shop(int rate) : rate(rate) {}
	__attribute__((noinline)) int price(const std::string &name) const;

private:
	int rate;
};

int Shop::price(const std::string &name) const
{
	return static_cast<int>(name.size()) * rate;
}

int main()
{
	Shop shop(10);
	std::string name;
	std::cout << "ready" << std::endl;
	while (std::getline(std::cin, name))
		std::cout << shop.price(name) << std::endl;
}

/* A patch for priced.cc. */
#include <string>

class Shop;

extern "C" int orig_price(const Shop *shop, const std::string &name);

extern "C" int price(const Shop *shop, const std::string &name)
{
	return orig_price(shop, name) + (name == "tea" ? 500 : 0);
}

// A class with a base, an enumeration in a namespace, and functions that are declared elsewhere than defined.
#include <cstdio>

namespace shop {
enum class Kind { SMALL, BIG };

struct Item {
    int price;
    Kind kind;
    virtual int cost() const { return price; }
    virtual ~Item() {}
};

struct Book : Item {
    int pages;
    char title[8];
    int cost() const override;
};

struct Copy : virtual Item {
    int number = 4;
};

int __attribute__((noinline)) number(Copy *copy) {
    asm volatile("" : : "r"(copy));
    return copy->number;
}

int __attribute__((noinline)) Book::cost() const { return price * 2 + pages; }

int __attribute__((noinline)) total(const Item &item, Book *book) { return item.cost() + book->cost(); }
}

int main() {
    shop::Book book;
    book.price = 3;
    book.kind = shop::Kind::BIG;
    book.pages = 100;
    std::snprintf(book.title, sizeof book.title, "book");
    std::printf("%d\n", shop::total(book, &book));
    shop::Copy copy;
    return shop::number(&copy) - 4;
}

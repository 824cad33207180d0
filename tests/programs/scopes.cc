// The same names in other scopes and source files (scopes2.cc, too).
#include <cstdio>

namespace shop {
struct Item {
    static int count;
    static const int limit = 41;
    enum Kind { SMALL = 3, LARGE };
    enum class Hue : unsigned char { RED = 7, BLUE = 250 };
    struct Part { short size; int weight; };
    int price;
    Kind kind;
    Hue hue;
    Part part;
    __attribute__((noipa)) int get(int n);
};
int Item::count = 5;
static int hidden = 61;
__attribute__((noipa)) void change_hidden(int n) { hidden += n; }
namespace {
int secret = 71;
struct Note { int a, b; };
}
__attribute__((noipa)) void change_secret(int n) { secret += n; }
inline namespace v2 {
struct Version { int number; };
int version = 81;
}
}

namespace yard {
struct Item { char name[3]; static int count; int price; __attribute__((noipa)) int get(int n); };
int Item::count = 6;
static int hidden = 62;
__attribute__((noipa)) void change_hidden(int n) { hidden += n; }
}

int hidden = 63;
struct Item { long number; };

template <class T> struct Box {
    T content;
    static T last;
    __attribute__((noipa)) T put(T n) { last = n; content = n; return n + 1; }
};
template <class T> T Box<T>::last = 3;

int shop::Item::get(int n) {
    count++;
    Note note{n, 2};
    __asm__ volatile("" : : "r"(&note) : "memory");
    return price + n + hidden + secret + version + note.a;
}

int yard::Item::get(int n) {
    count += 2;
    return price + n + hidden;
}

int apart(int);

int main(int argc, char **) {
    shop::Item one{1, shop::Item::LARGE, shop::Item::Hue::BLUE, {4, 5}};
    yard::Item two{{1, 2, 3}, 8};
    Box<int> box;
    Box<long> large;
    shop::Version version{3};
    Item item{9};
    __asm__ volatile("" : : "r"(&version), "r"(&item) : "memory");
    shop::change_hidden(0), shop::change_secret(0), yard::change_hidden(0);
    hidden += argc - 1, shop::version += argc - 1;
    std::printf("%d\n", one.get(argc) + two.get(argc) + box.put(4) + (int)large.put(5) + apart(3));
}

// Another source file of "scopes": its static variables, and types without linkage, have names that are in the first, too.
namespace shop {
static int hidden = 161;
namespace {
int secret = 171;
struct Note { double a; int b; };
}
}
struct Other { double d; int number; };

__attribute__((noipa)) int apart(int n) {
    shop::Note note{1, n};
    Other other{2, n};
    __asm__ volatile("" : : "r"(&note), "r"(&other) : "memory");
    shop::hidden += n;
    shop::secret += n;
    return n + shop::hidden + shop::secret;
}

// Names of all kinds that C++ compilers make: tests/integration/test_listed_names.py.
#include <string>
#include <vector>
#include <map>
#include <functional>
#include <cstdio>
#include <stdexcept>
namespace ns { namespace {
__attribute__((noinline)) std::string hidden(int n) { return std::string(n, 'x'); } } 
struct Base { virtual ~Base(); virtual int f(int); int x = 1; };
struct Other { virtual ~Other(); virtual int g(int); int y = 2; };
struct Both : Base, Other { Both(int); ~Both() override; int f(int) override; int g(int) override; operator bool() const; operator std::string() const; int operator()(int, char) const; int operator[](long) const; bool operator<(const Both &) const; Both &operator<<(int); Both *operator->(); bool operator,(int) const; void *operator new(size_t); void operator delete(void*); };
struct VB : virtual Base { VB(); int f(int) override; };
Base::~Base() { puts("~Base"); } int Base::f(int a) { return a + x; }
Other::~Other() { puts("~Other"); } int Other::g(int a) { return a + y; }
Both::Both(int a) { x = a; } Both::~Both() { puts("~Both"); } int Both::f(int a) { return a * x; } int Both::g(int a) { return a * y; }
Both::operator bool() const { return x; } Both::operator std::string() const { return std::to_string(x); }
int Both::operator()(int a, char c) const { return a + c; } int Both::operator[](long i) const { return i; }
bool Both::operator<(const Both &o) const { return x < o.x; } Both &Both::operator<<(int n) { x += n; return *this; } Both *Both::operator->() { return this; }
bool Both::operator,(int n) const { return n; }
void *Both::operator new(size_t n) { return malloc(n); } void Both::operator delete(void *p) { free(p); }
VB::VB() { puts("VB"); } int VB::f(int a) { return a - x; }
template <typename T, int N = 4, bool B = (N > 3)> __attribute__((noinline)) T tpl(T a, std::map<T, std::vector<T>> &m) { m[a].push_back(N); return a; }
template <typename F> __attribute__((noinline)) auto call(F f) { return f(3); }
__attribute__((noinline)) std::string named(const std::string &s) { return s + "!"; }
__attribute__((noinline)) std::string tagged() { return "t"; }
__attribute__((noinline)) int named(int s) { return s + 1; }
struct __attribute__((abi_tag("v2"))) Tagged { int m(); }; int Tagged::m() { return 3; }
__attribute__((noinline)) Tagged make() { return {}; }
__attribute__((noinline)) static int part(int a) { if (a > 100) throw std::runtime_error("big"); return a; }
template<class... A> __attribute__((noinline)) int var(A... a) { return (a + ... + 0); }
__attribute__((noinline)) decltype(auto) aut(int (*fn)(int), int (&arr)[3], int (Both::*mp)(int)) { return fn(arr[0]); }
}
int operator""_km(unsigned long long n) { return n; }
static int plain(int a) { return a; }
int main(int argc, char **argv) {
  ns::Both b(argc); ns::VB v; std::map<int, std::vector<int>> m; std::map<char, std::vector<char>> mc; std::map<long, std::vector<long>> ml;
  auto l = [&](int a) { puts("in lambda"); return a + argc; }; auto l2 = [](auto a) { puts("generic"); return a; };
  std::function<int(int)> f = l; int t = f(2) + ns::call(l) + ns::call(l2) + l2('c') + l2(3L);
  t += ns::tpl(1, m) + ns::tpl('c', mc) + ns::tpl<long, 2>(1, ml) + (b < b) + b[2] + b(1, 'c') + (bool)b + ((std::string)b).size() + (b, 3); b << 4; t += b->x;
  t += ns::hidden(3).size() + ns::named("x").size() + ns::named(3) + ns::make().m() + ns::tagged().size() + ns::part(t) + ns::var(1, 2L, 'c') + ns::var() + 3_km; int arr[3] = {1,2,3}; t += ns::aut(plain, arr, &ns::Both::f);
  ns::Base *p = new ns::Both(1); t += p->f(2); delete p; static std::string st = ns::named("q"); static auto sl = [](){ return ns::named("z"); }(); 
  struct Local { int m(int a) { puts("local"); return a; } static std::string s() { return "s"; } } lo; t += lo.m(3) + Local::s().size();
  printf("%d\n", t); }

/* caught: exceptions, virtual calls, tables of cases and of labels; "check" returns what all of it comes to. */
#include <cstdint>
#include <stdexcept>
#include <string>

namespace {

struct Guard {
	std::uint64_t &sum;
	~Guard() { sum = sum * 31 + 7; }
};

struct Shape {
	virtual ~Shape() = default;
	virtual std::uint64_t size(std::uint64_t n) const = 0;
};
struct Line : Shape {
	std::uint64_t size(std::uint64_t n) const override { return n + 1; }
};
struct Square : Shape {
	std::uint64_t size(std::uint64_t n) const override
	{
		if (n % 5 == 0)
			throw std::runtime_error("size " + std::to_string(n));
		return n * n;
	}
};

__attribute__((noinline)) std::uint64_t choose(std::uint64_t n, std::uint64_t sum)
{
	switch (n % 9) {
	case 0: return sum ^ n;
	case 1: return sum + 3 * n;
	case 2: return sum - n;
	case 3: return sum << 1;
	case 4: throw static_cast<int>(n);
	case 5: return sum >> 1;
	case 6: return ~sum;
	case 7: return sum * 5;
	default: return sum | n;
	}
}

__attribute__((noinline)) std::uint64_t labels(std::uint64_t n)
{
	static const void *const steps[] = {&&one, &&two, &&three};
	std::uint64_t sum = n;

next:
	if (n-- == 0)
		return sum;
	goto *steps[n % 3];
one:
	sum += n;
	goto next;
two:
	sum ^= n << 3;
	goto next;
three:
	sum = sum * 3 + 1;
	goto next;
}

__attribute__((noinline)) std::uint64_t nested(std::uint64_t n, std::uint64_t &sum)
{
	Guard guard{sum};

	if (n == 0)
		throw std::string("deep");
	return nested(n - 1, sum) + 1;
}

} // namespace

extern "C" std::uint64_t check(std::uint64_t rounds)
{
	Line line;
	Square square;
	const Shape *shapes[] = {&line, &square};
	std::uint64_t sum = 1;

	for (std::uint64_t n = 0; n < rounds; n++) {
		try {
			Guard guard{sum};
			sum += shapes[n & 1]->size(n);
			sum = choose(n, sum) + labels(n % 17);
			if (n % 7 == 0)
				sum += nested(n % 11, sum);
		} catch (int value) {
			sum += value;
		} catch (const std::runtime_error &error) {
			sum += std::string(error.what()).size();
		} catch (const std::string &message) {
			sum ^= message.size();
		}
	}
	return sum;
}

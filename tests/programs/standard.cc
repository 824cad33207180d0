// Uses much of the standard library, and prints what it computes: the same each time.

#include <algorithm>
#include <deque>
#include <iomanip>
#include <iostream>
#include <list>
#include <map>
#include <numeric>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

static int thrown(int depth)
{
    if (depth == 0)
        throw std::out_of_range("depth");
    std::string held(depth * 10, 'x');
    return thrown(depth - 1) + static_cast<int>(held.size());
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? std::stoi(argv[1]) : 50;
    std::mt19937 random(7);
    std::map<std::string, int> counts;
    std::unordered_map<int, std::string> names;
    std::list<double> list;
    std::deque<long> deque;
    std::set<std::wstring> wide;
    for (int i = 0; i < rounds; i++) {
        unsigned number = random();
        std::ostringstream text;
        text << std::hex << number << ' ' << std::setprecision(i % 17) << number / 7.0 << std::boolalpha << (i % 2 == 0);
        counts[text.str().substr(0, 2)]++;
        names[i] = text.str();
        list.push_front(number / 3.0);
        deque.push_back(static_cast<long>(number) - (i % 3));
        wide.insert(std::wstring(i % 5, L'a' + i % 26));
        std::istringstream back(text.str());
        unsigned hexadecimal = 0;
        double value = 0;
        back >> std::hex >> hexadecimal >> value;
        std::cout << text.str() << ' ' << hexadecimal << ' ' << value << '\n';
        try {
            if (i % 10 == 0)
                thrown(i % 7 + 1);
            std::vector<int>().at(i);
        } catch (const std::exception &error) {
            std::cout << error.what() << '\n';
        }
    }
    list.sort();
    std::sort(deque.begin(), deque.end());
    std::regex pattern("([0-9a-f]+) ([0-9.e+]+)(true|false)");
    int matched = 0;
    for (const auto &entry : names)
        matched += std::regex_search(entry.second, pattern);
    for (const auto &entry : counts)
        std::cout << entry.first << '=' << entry.second << ' ';
    std::cout << '\n' << list.front() << ' ' << deque.back() << ' ' << wide.size() << ' ' << matched << ' '
              << std::accumulate(list.begin(), list.end(), 0.0) << std::endl;
    return matched % 100;
}

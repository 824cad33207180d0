"""Names as people write them: which of the linker's names are meant, whole or by a part, and which are near."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.target.module_symbols import name_matcher
from dprobes.target.readable_names import Demangler, find_readable, near_readable, readable_parts

STRING_NAME = (
    "ns::named[abi:cxx11](std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> > const&)"
)
NAMES = {
    "shop::Cart::add(int)": "_ZN4shop4Cart3addEi",
    "shop::Cart::add(char const*)": "_ZN4shop4Cart3addEPKc",
    "shop::Cart::size() const": "_ZNK4shop4Cart4sizeEv",
    "shop::Cart::operator()(int)": "_ZN4shop4CartclEi",
    "shop::Cart::operator+=(int)": "_ZN4shop4CartpLEi",
    "shop::Cart::~Cart()": "_ZN4shop4CartD1Ev",
    "shop::(anonymous namespace)::hidden(int)": "_ZN4shop12_GLOBAL__N_16hiddenEi",
    "double shop::twice<double>(double)": "_ZN4shop5twiceIdEET_S1_",
    "int shop::twice<int>(int)": "_ZN4shop5twiceIiEET_S1_",
    "shop::Box<int>::get()": "_ZN4shop3BoxIiE3getEv",
    "shop::counter": "_ZN4shop7counterE",
    "lone(int, char*)": "_Z4loneiPc",
    "work() [clone .part.0]": "_Z4workv.part.0",
    "work()": "_Z4workv",
    "mycrate::shop::total": "_RNvNtCs1234_7mycrate4shop5total",
    STRING_NAME: "_ZN2ns5namedB5cxx11ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
    "ns::Both::g(int)": "_ZN2ns4Both1gEi",
    "non-virtual thunk to ns::Both::g(int)": "_ZThn8_N2ns4Both1gEi",
    "std::vector<int, std::allocator<int> > ns::first<int>(int)": "_ZN2ns5firstIiEESt6vectorIT_SaIS2_EES2_",
    "std::ostream& ns::operator<< <char>(std::ostream&, char)": "_ZN2nslsIcEERSoS1_T_",
    "ns::lam(int)": "_ZN2ns3lamEi",
    "ns::lam(int)::{lambda(int)#1}::operator()(int) const": "_ZZN2ns3lamEiENKUliE_clEi",
    "core::fmt::Formatter::pad": "_ZN4core3fmt9Formatter3pad17h0123456789abcdefE",
}
SYMBOLS = ["main", "add", *NAMES.values()]


def found(written: str) -> list[str]:
    return [each.readable for each in find_readable(SYMBOLS, written)]


def test_the_names_read_as_they_are_listed_here() -> None:
    assert [Demangler().name_of(symbol) for symbol in NAMES.values()] == list(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if "clone" not in name])
def test_a_whole_name_is_meant_itself(name: str) -> None:
    assert found(name) == [name]
    assert find_readable(SYMBOLS, name)[0].rank == -1


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Cart::add(int)", ["shop::Cart::add(int)"]),
        ("add( int )", ["shop::Cart::add(int)"]),
        ("Cart::add(const char *)", ["shop::Cart::add(char const*)"]),
        ("Cart::size", ["shop::Cart::size() const"]),
        ("Cart::size()", ["shop::Cart::size() const"]),
        ("Cart::operator()", ["shop::Cart::operator()(int)"]),
        ("operator+=(int)", ["shop::Cart::operator+=(int)"]),
        ("~Cart", ["shop::Cart::~Cart()"]),
        ("hidden", ["shop::(anonymous namespace)::hidden(int)"]),
        ("shop::twice<int>", ["int shop::twice<int>(int)"]),
        ("twice<double>(double)", ["double shop::twice<double>(double)"]),
        ("Box::get", ["shop::Box<int>::get()"]),
        ("lone", ["lone(int, char*)"]),
        ("lone(int,char *)", ["lone(int, char*)"]),
        ("work", ["work()"]),
        ("counter", ["shop::counter"]),
        ("shop::total", ["mycrate::shop::total"]),
        ("fmt::Formatter::pad", ["core::fmt::Formatter::pad"]),
        (
            "named(const std::string &)",
            [STRING_NAME],
        ),
        ("ns::Both::g", ["ns::Both::g(int)"]),
        ("non-virtual thunk to ns::Both::g(int)", ["non-virtual thunk to ns::Both::g(int)"]),
        ("ns::first<int>", ["std::vector<int, std::allocator<int> > ns::first<int>(int)"]),
        ("ns::operator<<", ["std::ostream& ns::operator<< <char>(std::ostream&, char)"]),
        ("ns::lam", ["ns::lam(int)"]),
        ("ns::lam(int)::{lambda(int)#1}::operator()", ["ns::lam(int)::{lambda(int)#1}::operator()(int) const"]),
        ("shop::Cart::add", ["shop::Cart::add(int)", "shop::Cart::add(char const*)"]),
        ("shop::twice", ["double shop::twice<double>(double)", "int shop::twice<int>(int)"]),
        ("art::add(int)", []),
        ("shop::Cart", []),
        ("shop", []),
        ("main", []),
        ("", []),
        ("::", []),
    ],
)
def test_a_part_is_enough_if_it_ends_the_name(written: str, meant: list[str]) -> None:
    assert found(written) == meant


def test_a_misprint_has_what_may_be_meant() -> None:
    assert near_readable(SYMBOLS, "shop::Cart::ad")[0] == "shop::Cart::add"
    assert near_readable(SYMBOLS, "store::Cart::size") == ["shop::Cart::size"]
    assert near_readable(SYMBOLS, "hiden") == ["shop::(anonymous namespace)::hidden"]
    assert near_readable(SYMBOLS, "qqqq") == []


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("int ns::f<int (*)(char)>(int)", ("ns::f<int (*)(char)>", "(int)")),
        ("ns::operator<<(std::ostream&)", ("ns::operator<<", "(std::ostream&)")),
        ("ns::T::operator int() const", ("ns::T::operator int", "() const")),
        ("operator new(unsigned long)", ("operator new", "(unsigned long)")),
        (
            "ns::f(int)::{lambda(char)#1}::operator()(char) const",
            ("ns::f(int)::{lambda(char)#1}::operator()", "(char) const"),
        ),
        ("plain", ("plain", "")),
    ],
)
def test_a_name_is_taken_apart_before_its_parameters(name: str, parts: tuple[str, str]) -> None:
    assert readable_parts(name) == parts


@given(st.text("operator<>(){}[]:,~ &*abc+", max_size=40))
def test_whatever_is_written_nothing_fails(written: str) -> None:
    find_readable(SYMBOLS, written)
    assert "".join(readable_parts(written)) in written or " " in written


def test_patterns_with_scopes_are_about_readable_names() -> None:
    def matching(pattern: str) -> list[str]:
        matches = name_matcher(pattern)
        return [name for name, symbol in NAMES.items() if matches(symbol)]

    assert matching("shop::Cart::s*") == ["shop::Cart::size() const"]
    assert matching("shop::Cart::add") == ["shop::Cart::add(int)", "shop::Cart::add(char const*)"]
    assert matching("*::add(int)") == ["shop::Cart::add(int)"]
    assert matching("shop::twice<*") == ["double shop::twice<double>(double)", "int shop::twice<int>(int)"]
    assert matching("_ZN4shop4Cart3add*") == ["shop::Cart::add(int)", "shop::Cart::add(char const*)"]
    assert matching("mycrate::*") == ["mycrate::shop::total"]

# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from unit.target.conftest import Toolbox

    ErrorOf = Callable[[Callable[[], object]], tuple[str, str | None]]


def nm(tools: Toolbox, path: Path) -> dict[str, int]:
    return {
        name: int(address, 16) for address, name in re.findall(r"^(\w+) \w (\w+)$", tools.run("nm", path), re.MULTILINE)
    }


def test_addresses_are_those_of_nm(tools: Toolbox, pie: Path, fixed: Path, static: Path, i386: Path) -> None:
    for path, names in (
        (pie, ["main", "work", "helper", "global_value", "zeroed"]),
        (fixed, ["main", "work", "helper", "global_value"]),
        (static, ["main", "work", "helper", "malloc"]),
        (i386, ["_start", "add"]),
    ):
        module, listed = Module.load(path), nm(tools, path)
        assert [listed[name] for name in names] == [module.address_of(name) for name in names]


def test_symbol_at_an_offset_is_that_of_its_address(tools: Toolbox, pie: Path) -> None:
    module = Module.load(pie)
    work = module.file_offset(nm(tools, pie)["work"])
    assert ("work", 0) == module.symbol_at(work)
    assert ("work", 5) == module.symbol_at(work + 5)
    assert module.symbol_at(1 << 40) is None


def test_function_start_of_a_stripped_file_comes_from_the_unwind_table(
    tools: Toolbox, pie: Path, stripped: Path
) -> None:
    full, bare = Module.load(pie), Module.load(stripped)
    for name in ("main", "work", "helper"):
        address = full.address_of(name)
        assert bare.symbol_at(bare.file_offset(address)) is None
        assert address == bare.function_start(bare.file_offset(address) + 2)
    assert bare.function_start(1 << 40) is None


def test_object_file_has_offsets_for_addresses(tools: Toolbox, i386: Path) -> None:
    module = Module.load(tools.directory / "small32.o")
    text = next(s for s in module.elf.sections if s.name == ".text")
    listed = nm(tools, module.path)
    for name in ("add", "_start"):
        assert text.offset + listed[name] == module.file_offset(module.address_of(name))
        assert (name, 0) == module.symbol_at(module.address_of(name))


def test_unknown_symbol_is_an_error_with_near_names(pie: Path, stripped: Path, error_of: ErrorOf) -> None:
    module, bare = Module.load(pie), Module.load(stripped)
    assert (f"'{pie}' has no symbol 'wrok'", "did you mean 'work'?") == error_of(lambda: module.address_of("wrok"))
    assert (f"'{pie}' has no symbol 'zzzz'", None) == error_of(lambda: module.address_of("zzzz"))
    hint = "the file is stripped: give its symbols with --sym FILE, install its debug file, or write a number"
    assert (f"'{stripped}' has no symbol 'work'", hint) == error_of(lambda: bare.address_of("work"))


SHOP = """
namespace shop {
struct Cart { int n; void add(int); };
int total(int a) { return a; }
int total(double a) { return int(a); }
static inline __attribute__((always_inline)) int inlined(int x) { return x * 3; }
void Cart::add(int k) { n += inlined(k); }
}
int counter;
int main() { shop::Cart c{0}; c.add(1); return c.n + counter + shop::total(2); }
"""


def test_names_of_cpp_are_found_as_people_write_them(tools: Toolbox, error_of: ErrorOf) -> None:
    shop = tools.directory / "shop"
    (tools.directory / "shop.cc").write_text(SHOP)
    tools.run("g++", "-g", "-O0", "-o", shop, tools.directory / "shop.cc")
    module = Module.load(shop)
    listed = nm(tools, shop)
    for name in ("shop::Cart::add", "shop::Cart::add(int)", "Cart::add(int)", "add", "_ZN4shop4Cart3addEi"):
        assert module.address_of(name) == listed["_ZN4shop4Cart3addEi"]
        assert module.code_offset_of(name, 1) == module.file_offset(listed["_ZN4shop4Cart3addEi"] + 1)
    assert module.address_of("total(double)") == listed["_ZN4shop5totalEd"]
    ambiguous = f"'shop::total' may be one of 2 functions of '{shop}': 'shop::total(int)', 'shop::total(double)'"
    hint = 'write the whole of one: offset = "shop::total(int)"'
    assert (ambiguous, hint) == error_of(lambda: module.address_of("shop::total"))
    for name in ("inlined", "shop::inlined(int)"):
        message = f"'{name}' is in the debug information of '{shop}', but not among its symbols"
        hint = "a function of that name was inlined, or left out: probe the one that it was inlined into"
        assert (message, hint) == error_of(partial(module.address_of, name))
    for name, near in (
        ("shop::Cart::ad", "'shop::Cart::add'"),
        ("Wrong::add", "'shop::Cart::add'"),
        ("shop::totl", "'shop::total'"),
    ):
        assert (f"'{shop}' has no symbol '{name}'", f"did you mean {near}?") == error_of(
            partial(module.address_of, name)
        )
    assert (f"'{shop}' has no symbol 'shop::zzzzzzz'", None) == error_of(lambda: module.address_of("shop::zzzzzzz"))


def test_data_is_no_place_of_code(pie: Path, error_of: ErrorOf) -> None:
    module = Module.load(pie)
    hint = "to see accesses to it, write 'address = zeroed' and 'watchpoint = w' (or rw)"
    assert (f"'zeroed' in '{pie}' is data, not code", hint) == error_of(lambda: module.code_offset_of("zeroed", 4))
    assert module.file_offset(module.address_of("work") + 4) == module.code_offset_of("work", 4)


def test_ambiguous_symbol_lists_the_offsets(tools: Toolbox, twice: Path, error_of: ErrorOf) -> None:
    listed = sorted(int(a, 16) for a in re.findall(r"^(\w+) t helper$", tools.run("nm", twice), re.MULTILINE))
    first, second = (ElfFile.open(twice).file_offset(address) for address in listed)
    message = (
        f"'helper' is the name of 2 places in '{twice}', at file offsets 0x{first:x} (main.c), 0x{second:x} (other.c)"
    )
    hint = f'write the intended one as "main.c:helper" or offset = 0x{first:x}'
    assert (message, hint) == error_of(lambda: Module.load(twice).address_of("helper"))
    assert [Module.load(twice).address_of(f"{file}:helper") for file in ("main.c", "other.c")] == listed
    missing = f"'{twice}' has no symbol 'third.c:helper'"
    assert error_of(lambda: Module.load(twice).address_of("third.c:helper"))[0] == missing


TAGGED = """
#include <string>
namespace ns {
std::string named(const std::string &s) { return s + "!"; }
std::string made() { return "made"; }
struct Base { virtual ~Base() {} virtual int f(int a) { return a; } };
struct Other { virtual ~Other() {} virtual int g(int a) { return a; } };
struct Both : Base, Other { int g(int a) override { return a + 1; } };
}
int main() {
    ns::Both b; ns::Other *o = &b; auto l = [](int a) { return a + 1; };
    return o->g(ns::named(ns::made()).size()) + l(2);
}
"""


def test_names_of_cpp_with_tags_thunks_and_lambdas(tools: Toolbox, error_of: ErrorOf) -> None:
    program = tools.directory / "tagged"
    (tools.directory / "tagged.cc").write_text(TAGGED)
    tools.run("g++", "-g", "-O0", "-o", program, tools.directory / "tagged.cc")
    module = Module.load(program)
    listed = nm(tools, program)
    for name in ("made", "ns::made", "ns::made[abi:cxx11]", "ns::made()", "ns::made[abi:cxx11]()"):
        assert module.address_of(name) == listed["_ZN2ns4madeB5cxx11Ev"]
    for name in ("named", "ns::named(const std::string &)"):
        assert module.address_of(name) == listed["_ZN2ns5namedERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"]
    assert module.address_of("ns::Both::g(int)") == listed["_ZN2ns4Both1gEi"]
    assert module.address_of("non-virtual thunk to ns::Both::g(int)") == listed["_ZThn8_N2ns4Both1gEi"]
    assert module.address_of("main::{lambda(int)#1}::operator()(int) const") == listed["_ZZ4mainENKUliE_clEi"]
    message = f"'ns::named' in '{program}' has not the parameters '(char*)'"
    (readable,) = [name for name, _ in module.symbols.readable("named")]
    assert (message, f"there is '{readable}'") == error_of(lambda: module.address_of("ns::named(char*)"))


def test_function_chosen_at_run_time_is_an_error_that_names_the_choices(
    tools: Toolbox, chosen: Path, error_of: ErrorOf
) -> None:
    message = f"'chosen' in '{chosen}' is chosen at run time (IFUNC): its symbol is the function that chooses"
    hint = "put the probe on one of the functions that it can choose: 'chosen_fast'"
    assert (message, hint) == error_of(lambda: Module.load(chosen).address_of("chosen"))
    bare = tools.directory / "libchosen_bare.so"
    tools.run("strip", "-o", bare, chosen)
    message = f"'chosen' in '{bare}' is chosen at run time (IFUNC): its symbol is the function that chooses"
    hint = "put the probe on one of the functions that it can choose; their names need the debug file or --sym"
    assert (message, hint) == error_of(lambda: Module.load(bare).address_of("chosen"))


def test_imported_symbol_is_an_error_that_names_the_libraries(pie: Path, stripped: Path, error_of: ErrorOf) -> None:
    for path in (pie, stripped):
        message = f"'printf' is imported by '{path}', not defined in it"
        hint = "put the probe on the library that defines it: 'libc.so.6'"
        assert (message, hint) == error_of(partial(Module.load(path).address_of, "printf"))


def test_of_several_libraries_the_first_one_that_has_an_imported_symbol_is_named(
    tools: Toolbox, error_of: ErrorOf
) -> None:
    first, program = tools.directory / "libown_malloc.so", tools.directory / "allocating"
    allocator, source = tools.directory / "own_malloc.c", tools.directory / "allocating.c"
    allocator.write_text("#include <stddef.h>\nvoid *malloc(size_t size) { return size ? NULL : NULL; }\n")
    source.write_text("#include <stdlib.h>\nint main(void) { return malloc(7) == 0; }\n")
    tools.run("gcc", "-shared", "-fPIC", "-Wl,-soname,libown_malloc.so", "-o", first, allocator)
    tools.run("gcc", "-fno-builtin", "-o", program, source, "-Wl,-rpath,$ORIGIN", first)
    message = f"'malloc' is imported by '{program}', not defined in it"
    hint = "put the probe on the library that defines it: 'libown_malloc.so'"
    found = error_of(partial(Module.load(program).address_of, "malloc"))
    assert (message, hint) == found
    first.unlink()
    hint = "put the probe on the library that defines it: 'libc.so.6'"
    assert (message, hint) == error_of(partial(Module.load(program).address_of, "malloc"))


def test_thread_local_symbol_is_an_error(pie: Path, error_of: ErrorOf) -> None:
    message = f"'per_thread' in '{pie}' is thread-local: each thread has its own address"
    assert (message, None) == error_of(lambda: Module.load(pie).address_of("per_thread"))


def test_address_without_bytes_in_the_file_is_an_error(pie: Path, error_of: ErrorOf) -> None:
    module = Module.load(pie)
    address = module.address_of("zeroed")
    assert (f"address 0x{address:x} is not in the file '{pie}'", None) == error_of(lambda: module.file_offset(address))


def test_debug_file_is_not_looked_for_when_the_dynamic_symbols_answer(
    libc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_elf: ElfFile) -> None:
        raise AssertionError("looked for")

    monkeypatch.setattr("dprobes.target.elf.symbol_sources.find_debug_file", fail)
    assert Module.load(libc).address_of("write")

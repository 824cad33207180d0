"""The kernel's list of symbols: names, addresses, patterns, and addresses that are hidden."""

from __future__ import annotations

import difflib
import random
import re
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.kernel.kernel_symbols import Kallsyms, KernelSymbol
from dprobes.target.kernel.running_kernel import RunningKernel
from support.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Iterator

LIST = b"""0000000000000000 A fixed_percpu_data
ffffffff81000000 T _text
ffffffff81000040 t helper
ffffffff81000040 T __helper
ffffffff81000100 T vfs_read
ffffffff81000180 t helper
ffffffff81000200 T vfs_write
ffffffff82000000 D jiffies
ffffffffc0201000 t ext4_readdir\t[ext4]
ffffffffc0101000 t dummy_xmit\t[dummy]
ffffffffc0101080 d dummy_data\t[dummy]
"""
SYMBOLS = Kallsyms(LIST)


def test_names_are_found_in_all_modules_or_one() -> None:
    assert [hex(symbol.address) for symbol in SYMBOLS.find("helper")] == ["0xffffffff81000040", "0xffffffff81000180"]
    assert SYMBOLS.find("dummy_xmit") == [KernelSymbol("dummy_xmit", 0xFFFFFFFFC0101000, "t", "dummy")]
    assert SYMBOLS.find("dummy_xmit", "") == []
    assert SYMBOLS.find("vfs") == []
    assert SYMBOLS.find("vfs_r..d") == []


def test_an_address_belongs_to_the_function_before_it() -> None:
    def name(address: int) -> str | None:
        symbol = SYMBOLS.covering(address)
        return symbol.name if symbol is not None else None

    assert name(0xFFFFFFFF81000100) == name(0xFFFFFFFF8100017F) == "vfs_read"
    assert name(0xFFFFFFFF81000041) == "__helper"  # the global one of two names
    assert name(0xFFFFFFFF82000004) == "vfs_write"  # data is no function
    assert name(0xFFFFFFFFC0101044) == "dummy_xmit"
    assert name(0xFFFFFFFFC0201044) == "ext4_readdir"
    assert name(0x1000) is None


def test_all_names_of_an_address() -> None:
    assert SYMBOLS.names_at(0xFFFFFFFF81000040) == {"helper", "__helper"}
    assert SYMBOLS.names_at(0xFFFFFFFF81000041) == set()
    assert SYMBOLS.names_at(0xFFFFFFFFC0101000) == {"dummy_xmit"}


def test_patterns_match_functions_of_a_module() -> None:
    assert [symbol.name for symbol in SYMBOLS.matching("vfs_*", "")] == ["vfs_read", "vfs_write"]
    assert [symbol.name for symbol in SYMBOLS.matching("*", "dummy")] == ["dummy_xmit"]
    assert list(SYMBOLS.matching("[v]fs_rea", "")) == []
    assert [symbol.name for symbol in SYMBOLS.matching("[v]fs_rea?", "")] == ["vfs_read"]


def test_near_names() -> None:
    assert SYMBOLS.near("vfs_raed", "") == ["vfs_read", "vfs_write"]
    assert SYMBOLS.near("jifies", "") == ["jiffies"]
    assert SYMBOLS.near("nothing_like_it", "") == []
    assert SYMBOLS.near("jif", "") == []
    assert SYMBOLS.near("dummy_xmt", "dummy") == ["dummy_xmit", "dummy_data"]
    assert SYMBOLS.near("dummy_xmt", "") == []


def test_few_of_many_names_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def close(word: str, names: list[str], n: int, cutoff: float) -> list[str]:
        compared.append(len(names))
        return get_close_matches(word, names, n, cutoff)

    get_close_matches = difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", close)
    many = Kallsyms(b"".join(b"ffffffff81%06x T vfs_%07d\n" % (n, n) for n in range(50_000)) + LIST)
    assert many.near("fvs_0012345", "")[0] == "vfs_0012345"
    assert many.near("vfs_raed", "") == ["vfs_read", "vfs_write"]
    assert max(compared) <= 300


def test_the_function_before_an_address_that_others_call() -> None:
    assert SYMBOLS.global_before(0xFFFFFFFF81000180) == "vfs_read"
    assert SYMBOLS.global_before(0xFFFFFFFF81000040) == "_text"
    assert SYMBOLS.global_before(0xFFFFFFFF81000000) is None
    assert SYMBOLS.global_before(0xFFFFFFFFC0201000) is None  # a module's


def test_hidden_addresses_are_noticed() -> None:
    assert not SYMBOLS.is_hidden
    assert Kallsyms(b"0000000000000000 T _text\n0000000000000000 t vfs_read\n").is_hidden
    assert Kallsyms(b"").is_hidden
    assert not SYMBOLS.has_data


# Texts of which anything may be wrong: those of a machine or a file are whatever somebody has put there.

PIECES = (
    b"\n",
    b" ",
    b"\t",
    b"[",
    b"]",
    b"\t[",
    b"]\n",
    b"\0",
    b"\xff",
    b"\xc3\xa9",
    b"f" * 17,
    b"T",
    b"*",
    b"  ",
    b"t x\n",
    b"",
)


def mutated(dice: random.Random) -> bytes:
    """Return the list with a few places changed, removed, repeated, or cut off."""
    data = bytearray(LIST)
    for _ in range(dice.randint(1, 12)):
        first, last = sorted(dice.randrange(len(data) + 1) for _ in range(2))
        match dice.randrange(5):
            case 0:
                data[first:first] = dice.choice(PIECES)
            case 1:
                data[first : first + dice.randint(1, 3)] = dice.choice(PIECES)
            case 2:
                data[first:first] = data[first:last]
            case 3:
                del data[first : first + dice.randint(1, 40)]
            case _:
                lines = data.splitlines(keepends=True)
                dice.shuffle(lines)
                data = bytearray(b"".join(lines))
    return bytes(data)


def listed(data: bytes) -> Iterator[KernelSymbol]:
    """Take a list apart line by line."""
    for line in data.split(b"\n"):
        match = re.fullmatch(rb"([0-9a-f]{1,16}) ([!-~]) ([^\s]+)(?:[ \t]+\[([^\s]+)\])?", line)
        if match is not None:
            address, letter, name, module = (each.decode(errors="replace") for each in match.groups(b""))
            yield KernelSymbol(name, int(address, 16), letter, module)


@pytest.mark.parametrize("part", range(8))
def test_any_text_is_answered_as_its_lines_say(part: int) -> None:
    for seed in range(part, rounds(800, 240), 8):
        data = mutated(random.Random(seed))
        symbols, lines = Kallsyms(data), list(listed(data))
        assert list(symbols.all()) == lines, seed
        names = {symbol.name for symbol in lines if symbol.name.isascii()} | {"helper", "vfs_read", "none"}
        for name in sorted(names):
            for module in ("", "dummy", "ext4"):
                wanted = {symbol for symbol in lines if (symbol.name, symbol.module) == (name, module)}
                assert symbols.find(name, module) == sorted(wanted, key=lambda symbol: symbol.address), seed
                near = symbols.near(name, module)
                assert len(near) <= 3
                assert set(near) <= {symbol.name for symbol in lines if symbol.module == module}, seed
        for pattern in ("*", "vfs_*", "[v]*", "?elper", "h*"):
            for module in ("", "dummy"):
                wanted_names = [
                    symbol.name
                    for symbol in lines
                    if symbol.is_code
                    and symbol.module == module
                    and re.fullmatch(PATTERNS[pattern], symbol.name, re.DOTALL)
                ]
                assert [symbol.name for symbol in symbols.matching(pattern, module)] == wanted_names, seed
        for address in {symbol.address + distance for symbol in lines for distance in (-1, 0, 1)}:
            covering = symbols.covering(address)
            assert covering is None or covering in lines, seed
            assert symbols.names_at(address) <= {s.name for s in lines if s.address == address}, seed
            before = symbols.global_before(address)
            assert before is None or before in {symbol.name for symbol in lines}, seed
        for symbol in lines:
            following = symbols.following(symbol)
            assert following is None or following in {each.address for each in lines}, seed
        assert symbols.is_hidden in (False, True)


PATTERNS = {"*": ".*", "vfs_*": "vfs_.*", "[v]*": "v.*", "?elper": ".elper", "h*": "h.*"}


def test_any_text_finds_a_symbol_or_ends_in_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningKernel, "source_files", lambda *_: {})
    said = set()
    for seed in range(rounds(800, 240)):
        data = mutated(random.Random(seed))
        kernel = RunningKernel(Kallsyms(data))
        for name in ("helper", "vfs_read", "no_such_name"):
            try:
                assert kernel.symbol(name, "", is_code=True).name == name
            except TargetError as error:
                said.add(re.sub("'[^']*'|0x[0-9a-f]+|[0-9]+", "…", error.message).partition(",")[0])
    assert said >= {"the kernel has no symbol …", "… is the name of … places in the kernel"}


def test_a_line_without_an_end_is_looked_at_once() -> None:
    """Each of the places where a name could stand is in the same line, which has no symbol."""
    data = LIST + b"x" + b" helper" * 300_000 + b"\n" + LIST
    symbols = Kallsyms(data)
    assert [symbol.address & 0xFFF for symbol in symbols.find("helper")] == [0x40, 0x180]
    assert [symbol.name for symbol in symbols.matching("helper*", "")] == ["helper"] * 4

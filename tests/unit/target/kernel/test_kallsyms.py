"""The kernel's list of symbols: names, addresses, patterns, and addresses that are hidden."""

from __future__ import annotations

from dprobes.target.kernel.kallsyms import Kallsyms, KernelSymbol

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


def test_hidden_addresses_are_noticed() -> None:
    assert not SYMBOLS.is_hidden
    assert Kallsyms(b"0000000000000000 T _text\n0000000000000000 t vfs_read\n").is_hidden
    assert Kallsyms(b"").is_hidden
    assert not SYMBOLS.has_data

"""The symbols that answered give the same answers alone."""

from __future__ import annotations

from dprobes.target.kernel.kernel_symbols import Kallsyms, NeededKallsyms, listed

DATA = b"".join(b"ffffffff81%06x t f_%d\n" % (16 * n, n) for n in range(200)) + (
    b"ffffffff81010000 T alias\nffffffff81010000 T vfs_read\nffffffff82000000 D jiffies\n"
    b"ffffffffc0000000 t f_7\t[dummy]\nffffffffc0000010 t dummy_xmit\t[dummy]\n"
)


def test_answers_are_carried_and_nothing_else() -> None:
    asked = NeededKallsyms(DATA)
    addresses = [0xFFFFFFFF81000000 + 16 * n + 3 for n in (0, 5, 199)] + [0xFFFFFFFFC0000011, 0x1000]
    covering = {address: asked.covering(address) for address in addresses}
    found = {name: asked.find(name, "") for name in ("f_7", "jiffies", "no_such", "vfs_read")}
    matching = list(asked.matching("f_1?", ""))
    asked.need_names([0xFFFFFFFF81010000])
    carried = Kallsyms(listed(asked.needed))
    assert {address: carried.covering(address) for address in addresses} == covering
    assert {name: carried.find(name, "") for name in found} == found
    assert list(carried.matching("f_1?", "")) == matching
    assert len(matching) == 10
    assert carried.names_at(0xFFFFFFFF81010000) == {"alias", "vfs_read"}
    names = {"f_0", "f_5", "f_199", "f_7", "jiffies", "vfs_read", "alias", "dummy_xmit"}
    assert {symbol.name for symbol in asked.needed} == names | {f"f_{n}" for n in range(10, 20)}

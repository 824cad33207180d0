"""Which jumps belong together, and in which order pieces of one instruction run."""

from __future__ import annotations

from dprobes.bpf.bpf_assembler import Assembled
from dprobes.engines.inline.handler_pieces import NumberedCode, Order, Piece, site_groups

CODE = NumberedCode(Assembled((), (), (), ()), 0)


def piece(order: Order, probe: int, address: int) -> Piece:
    return Piece(order, probe, address, b"\xc3", CODE)


def grouped(*pieces: Piece) -> list[tuple[list[int], bool]]:
    return [(list(group.sites), group.is_bound) for group in site_groups(pieces)]


def test_instructions_are_apart_where_no_entry_is_kept() -> None:
    returns = [piece(Order.RETURN, 0, address) for address in (10, 30, 20)]
    assert grouped(*returns) == [([30], False), ([20], False), ([10], False)]


def test_the_entry_and_the_returns_of_a_function_belong_together() -> None:
    pieces = [piece(Order.ENTRY, 0, 10), piece(Order.RETURN, 0, 30), piece(Order.RETURN, 0, 20)]
    assert grouped(*pieces, piece(Order.HANDLER, 1, 40)) == [([40], False), ([30, 20, 10], True)]


def test_instructions_that_serve_several_probepoints_join_what_these_have() -> None:
    pieces = [piece(Order.ENTRY, 0, 10), piece(Order.RETURN, 0, 30)]
    others = [piece(Order.ENTRY, 1, 10), piece(Order.RETURN, 1, 50), piece(Order.RETURN, 2, 30)]
    (group,) = site_groups([*pieces, *others, piece(Order.HANDLER, 3, 10)])
    assert (list(group.sites), group.is_bound) == ([50, 30, 10], True)
    assert {piece.probe for pieces in group.sites.values() for piece in pieces} == {0, 1, 2, 3}


def test_entries_come_first_and_returns_last() -> None:
    pieces = [piece(Order.RETURN, 0, 10), piece(Order.HANDLER, 2, 10), piece(Order.HANDLER, 1, 10)]
    (group,) = site_groups([*pieces, piece(Order.ENTRY, 3, 10)])
    assert [(each.order, each.probe) for each in group.sites[10]] == [
        (Order.ENTRY, 3), (Order.HANDLER, 1), (Order.HANDLER, 2), (Order.RETURN, 0)
    ]  # fmt: skip

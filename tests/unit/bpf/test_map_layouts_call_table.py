"""Calls have places in the table of a process, apart from each other."""

from __future__ import annotations

from dprobes.bpf.map_layouts import CALL_WINDOW, REGISTERS, SLOTS_SHIFT, CallTable, call_key


def test_slots_have_room_for_the_registers() -> None:
    assert [CallTable.of(count).slot for count in (0, 1, 6, 7, 14, 15, 44)] == [64, 64, 64, 128, 128, 256, 512]
    assert all(CallTable.of(count).slot >= REGISTERS + 8 * count for count in range(45))


def test_calls_of_different_probepoints_have_different_keys() -> None:
    assert call_key(0, 0x7FFF_0000_1230) == 0x7FFF_0000_1230
    assert call_key(3, 0x7FFF_0000_1230) == 0x0003_7FFF_0000_1230


def test_a_window_is_within_the_table() -> None:
    table = CallTable.of(2)
    for frame in range(0x7FFC_0000_0000, 0x7FFC_0010_0000, 0x1FF8):
        window = table.window(call_key(16383, frame))
        assert len(window) == CALL_WINDOW
        assert window.start % table.slot == 0
        assert window.stop <= table.size


def test_frames_of_a_recursion_are_spread() -> None:
    table = CallTable.of(0)
    firsts = {table.window(call_key(1, 0x7FFC_1234_5678 - 48 * depth)).start for depth in range(1000)}
    assert len(firsts) > 900
    assert max(firsts) > (1 << SLOTS_SHIFT) * table.slot * 3 // 4

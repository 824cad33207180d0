"""Registers of each processor, as they stand in notes."""

from __future__ import annotations

import struct

from dprobes.platform.core.core_file import PROCESSORS, NoteType, RegisterField, image_of


def test_registers_are_cut_and_widened_in_the_order_of_the_processor() -> None:
    fields = (RegisterField(("a",), 4), RegisterField((), 2), RegisterField(("b", "c"), 2))
    known = {"a": 0x1_2345_6789, "c": 0x11}
    assert image_of(fields, "little", known.get) == bytes.fromhex("89674523 0000 1100")
    assert image_of(fields, "big", known.get) == bytes.fromhex("23456789 0000 0011")


def test_a_tag_word_is_abridged_as_fxsave_stores_it() -> None:
    (_, fields), *_ = PROCESSORS["x86_64"].more
    image = image_of(fields, "little", {"fctrl": 0x37F, "ftag": 0x3FFF, "st7": 0x3FFF << 64, "xmm15": 7}.get)
    control, status, tag, opcode = struct.unpack_from("<HHHH", image)
    assert (control, status, tag, opcode) == (0x37F, 0, 0x80, 0)  # only the last register holds something
    assert image[32 + 7 * 16 : 32 + 8 * 16] == (0x3FFF << 64).to_bytes(16, "little")
    assert image[160 + 15 * 16 : 160 + 16 * 16] == (7).to_bytes(16, "little")
    assert len(image) == 512


def test_a_vector_of_sve_begins_with_the_shorter_one() -> None:
    (kind, fields), *_ = PROCESSORS["aarch64"].more
    assert kind is NoteType.PRFPREG
    long = int.from_bytes(bytes(range(256)), "little")
    assert image_of(fields, "little", {"z1": long}.get)[:32] == bytes(16) + bytes(range(16))

"""What each place-holder makes of data, and what it says about data that is not there."""

from __future__ import annotations

import struct

import pytest

from dprobes.formatters.templates.data_extraction import Fault
from dprobes.formatters.templates.template_renderer import render
from dprobes.record.log_record import LogRecord
from dprobes.rpn.instruction_set import UNSEEN_ENTRY, StackEnd
from unit.formatters.templates.support import formatted, item, problems_of, template_of, values

WORDS = struct.pack("<Qq", 42, -5)


@pytest.mark.parametrize(
    ("fmt", "data", "text"),
    [
        ("%d", struct.pack("<q", -5), "-5"),
        ("%u", struct.pack("<q", -5), "18446744073709551611"),
        ("%x", struct.pack("<Q", 0xABC), "abc"),
        ("0x%x", struct.pack("<Q", 0xABC), "0xabc"),
        ("%o", struct.pack("<Q", 8), "10"),
        ("%p", struct.pack("<Q", 0xABC), "0xabc"),
        ("%a", struct.pack("<Q", 0xABC), "0xabc"),
        ("%c", struct.pack("<Q", 0x41), "A"),
        ("%c", struct.pack("<Q", 0x20AC), "€"),
        ("%c", struct.pack("<Q", 7), r"\x07"),
        ("%c", struct.pack("<Q", 1 << 40), "<no character: 0x10000000000>"),
        ("%bd %bu", b"\xff\xff", "-1 255"),
        ("%wd %wx", b"\xff\xff\xff\xff", "-1 ffff"),
        ("%dd %dx", b"\xff" * 8, "-1 ffffffff"),
        ("%qd %qo", b"\xff" * 16, "-1 1777777777777777777777"),
        ("%nd", b"\xff" * 8, "-1"),
        ("%bc%bc%bc", b"ab\n", r"ab\n"),
        ("%dp", struct.pack("<I", 16), "0x10"),
        ("[%5d]", struct.pack("<q", -42), "[  -42]"),
        ("[%-5d]", struct.pack("<q", -42), "[-42  ]"),
        ("[%05d]", struct.pack("<q", -42), "[-0042]"),
        ("[%-05d]", struct.pack("<q", -42), "[-42  ]"),
        ("[%.4d]", struct.pack("<q", -42), "[-0042]"),
        ("[%8.4x]", struct.pack("<q", 0xAB), "[    00ab]"),
        ("[%08.4x]", struct.pack("<q", 0xAB), "[    00ab]"),
        ("[%2d]", struct.pack("<q", 12345), "[12345]"),
        ("[%.0d]", struct.pack("<q", 0), "[]"),
        ("[%3.0x]", struct.pack("<q", 0), "[   ]"),
        ("[%.0d]", struct.pack("<q", -7), "[-7]"),
        ("%X %#x %#X %#o", struct.pack("<4Q", 171, 171, 171, 8), "AB 0xab 0XAB 010"),
        ("%+d % d %(n)+5d % +d", struct.pack("<4q", 5, 5, 5, -5), "+5  5    +5 -5"),
        ("%+x|% u", struct.pack("<2Q", 5, 5), "5|5"),
        ("[%#06x] [%#.0o] [%#x]", struct.pack("<3Q", 255, 0, 0), "[0x00ff] [0] [0]"),
        ("[%6p]", struct.pack("<Q", 0xAB), "[  0xab]"),
        ("[%-6a]", struct.pack("<Q", 0xAB), "[0xab  ]"),
        ("[%3c]", struct.pack("<Q", 0x41), "[  A]"),
        ("%d%%", struct.pack("<q", 5), "5%"),
        ("%nds", struct.pack("<q", 5), "5s"),
        ("%T", struct.pack("<q", 1_234_567), "1.23 ms"),
        ("[%8qT]", struct.pack("<q", -2500), "[ -2.5 us]"),
        ("%(took)wT", struct.pack("<h", 999), "999 ns"),
        ("%dT", struct.pack("<q", 5), "5T"),
        ("%(n)d %(m)04x", struct.pack("<qQ", -5, 10), "-5 000a"),
    ],
)
def test_numbers_are_printed_as_in_c(fmt: str, data: bytes, text: str) -> None:
    assert text == formatted(fmt, data)


@pytest.mark.parametrize(
    ("fmt", "number", "text"),
    [
        ("%bv", 0xFF, "255"),
        ("%wv", 0xFFFF, "65535"),
        ("%dv", (1 << 27) - 1, "134217727"),
        ("%dv", 1 << 27, "0x8000000"),
        ("%dv", 0xFFFFF000, "0xfffff000"),
        ("%dv", 0xFFFFF001, "-4095"),
        ("%dv", 0xFFFFFFFF, "-1"),
        ("%v", 0, "0"),
        ("%v", 1 << 27, "134217728"),
        ("%v", 0xFFFFF000, "4294963200"),
        ("%v", 0xFFFFF001, "-4095"),  # what an int is in the register that a function returns it in
        ("%v", 0xFFFFFFFF, "-1"),
        ("%v", 1 << 32, "4294967296"),
        ("%v", (1 << 40) - 1, "1099511627775"),
        ("%v", 1 << 40, "0x10000000000"),
        ("%v", (1 << 64) - 4096, "0xfffffffffffff000"),
        ("%v", (1 << 64) - 4095, "-4095"),
        ("%v", (1 << 64) - 1, "-1"),
        ("[%4v] [%-4nv]", 7, "[   7] [7   ]"),
    ],
)
def test_a_number_is_printed_as_people_take_it(fmt: str, number: int, text: str) -> None:
    size = {"b": 1, "w": 2, "d": 4}.get(fmt[1], 8)
    data = number.to_bytes(size, "little") * fmt.count("%")
    assert text == formatted(fmt, data)
    # The same with what cannot go the short way.
    assert f"{text} x" == formatted(f"{fmt} %*s", data + item(1, b"x"))


def test_numbers_of_an_item_are_printed_so_too() -> None:
    assert formatted("%*v", item(5, struct.pack("<qQQ", -1, 1 << 47, 7), 3)) == "-1 0x800000000000 7"


def test_a_letter_d_before_a_conversion_is_a_size() -> None:
    assert formatted("%dx", struct.pack("<I", 255)) == "ff"
    assert formatted("%d x", struct.pack("<q", 255)) == "255 x"
    assert formatted("%ndx", struct.pack("<q", 255)) == "255x"


def test_words_and_byte_order_are_those_of_the_record() -> None:
    data = b"\0\0\1\2"
    assert formatted("%x", data, word_size=4, byte_order="big") == "102"
    assert formatted("%x", data, word_size=4, byte_order="little") == "2010000"
    assert formatted("%nx %p", data + data, word_size=4, byte_order="big") == "102 0x102"
    assert formatted("%*nx", b"\5\0\2" + data + data, word_size=4, byte_order="big") == "102 102"
    assert formatted("%*wx", b"\0\0\4" + data, word_size=4, byte_order="big") == "0 102"


@pytest.mark.parametrize(
    ("fmt", "data", "text"),
    [
        ("%s|%bd", b"abc\0\7", "abc|7"),
        ("%s|%s|", b"abc\0\0", "abc||"),
        ("%s|", b"abc", "abc|"),
        ("[%6s]", b"abc\0", "[   abc]"),
        ("[%-6s]", b"abc\0", "[abc   ]"),
        ("%.4s|%bd", b"abcd\7", "abcd|7"),
        ("%.4s|%bd", b"a\0\xff\xff\7", "a|7"),
        ("%.4s|", b"", "<missing 4 bytes>|"),
        ("%s", "grüß\tdich\x1b[2J\0".encode(), r"grüß\tdich\x1b[2J"),
        ("%s", b"\xff\xfe\0", r"\xff\xfe"),
        ("%s", "\u2028\U000e0001\0".encode(), r"\u2028\U000e0001"),
    ],
)
def test_strings_end_at_their_nul_or_have_a_fixed_length(fmt: str, data: bytes, text: str) -> None:
    assert text == formatted(fmt, data)


@pytest.mark.parametrize(
    ("fmt", "data", "text"),
    [
        ("%*s", item(1, b"hello"), "hello"),
        ("[%*8s]", item(1, b"hello"), "[   hello]"),
        ("[%*-8s]", item(1, b"hello"), "[hello   ]"),
        ("[%*.3s]", item(1, b"hello"), "[hel]"),
        ("%*s|%*s", item(1, b"") + item(0, b"ab\0cd"), "|ab"),
        ("%*c", item(1, b"ab\0\x1b"), r"ab\0\x1b"),
        ("[%*5c]", item(0, b"abc"), "[  abc]"),
        ("%*bx", item(0, b"\1\2\xff"), "1 2 ff"),
        ("%*02bx", item(0, b"\1\2\xff"), "01 02 ff"),
        ("%*bd", item(0, b"\1\2\xff"), "1 2 -1"),
        ("%*d", item(5, WORDS, 2), "42 -5"),
        ("%*3d|", item(6, WORDS, 2), " 42  -5|"),
        ("%*u", item(7, WORDS, 2), "42 18446744073709551611"),
        ("%*p", item(8, WORDS[:8], 1), "0x2a"),
        ("%*dd", item(5, WORDS, 2), "42 0 -5 -1"),
        ("%*nc", item(7, struct.pack("<QQ", 0x41, 0x42), 2), "AB"),
        ("%*d|", item(7, b"", 0), "|"),
    ],
)
def test_an_item_is_printed_with_all_its_elements(fmt: str, data: bytes, text: str) -> None:
    assert text == formatted(fmt, data)


def test_words_are_a_string_whose_first_byte_is_in_the_low_bits() -> None:
    text = b"abcdefghij".ljust(16, b"\0")
    assert formatted("%*-12s|", item(7, text, 2)) == formatted("%*-12s|", item(1, b"abcdefghij"))
    words = struct.pack(">QQ", *struct.unpack("<QQ", text))
    assert formatted("%*s", b"\x07\0\2" + words, byte_order="big") == "abcdefghij"


def test_the_frames_of_a_call_stack_are_lines() -> None:
    frames = struct.pack("<QQ", 0x401136, 0x7F0000001234)
    assert formatted("%*k", item(10, frames, 2)) == "0x401136\n0x7f0000001234"
    assert formatted("by %*kto %bd", item(9, frames, 2) + b"\5") == "by \n0x401136\n0x7f0000001234\nto 5"
    assert formatted("%*k|", item(10, b"", 0)) == "|"
    assert formatted("%*k", item(10, frames, 3)) == "0x401136\n0x7f0000001234\n<missing 8 bytes>"
    assert formatted("%*k", item(0xFF, WORDS[:8])) == "<fault at 0x2a>"
    assert formatted("%*k", b"") == "<missing item>"
    assert formatted("%*k|", item(7, frames + bytes(16), 4)) == "0x401136\n0x7f0000001234\n|"
    narrow = item(10, struct.pack("<II", 0x8049000, 2), 2)
    assert formatted("%*k", narrow, word_size=4) == "0x8049000\n<no unwind table goes on from here>"


def test_a_line_of_a_call_stack_without_frames_is_left_out() -> None:
    template = template_of('fmt = "%*k"\nfmt = "%*k"\nfmt = "n=%d"')
    user = item(10, struct.pack("<Q", 0x401136), 1)
    record = LogRecord(major=1, minor=1, data=item(9, b"", 0) + user + bytes(8))
    assert render(template, record) == "0x401136\nn=0"


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (StackEnd.NO_TABLE, "<no unwind table goes on from here>"),
        (StackEnd.BAD_TABLE, "<the unwind table cannot be understood here>"),
        (StackEnd.UNREADABLE, "<the stack cannot be read here>"),
        (StackEnd.NOT_RISING, "<the stack does not rise here>"),
    ],
)
def test_the_end_of_a_call_stack_says_why_it_is_there(end: StackEnd, text: str) -> None:
    assert formatted("%*k", item(10, struct.pack("<QQ", 0x401136, end), 2)) == f"0x401136\n{text}"


def test_a_dump_has_lines_of_its_own() -> None:
    dump = "0x00000000 : 00010203 04050607 08090a0b 0c0d0e0f : ................\n0x00000010 : 40c1" + 31 * " " + " : @A"
    data = item(0, bytes([*range(16), 0x40, 0xC1]))
    assert formatted("%*h", data) == dump
    assert formatted("buffer %*hof %bd", data + b"\5") == f"buffer \n{dump}\nof 5"
    assert formatted("%*h|", item(0, b"")) == "|"
    assert (
        formatted("%*h", item(0, b"A", 3)) == "0x00000000 : 41                                  : A <missing 2 bytes>"
    )


def test_the_rest_is_printed_in_hexadecimal() -> None:
    assert formatted("%bd: %r", b"\1\2\3") == "1: 02 03"
    assert formatted("%bd: %r|%r", b"\1") == "1: |"
    assert formatted("%bd: %r|%bd", b"\1\2") == "1: 02|<missing 1 byte>"


def test_the_items_that_are_left_are_printed_as_what_they_are() -> None:
    data = item(1, b"ls\n") + item(0, b"\1\2") + item(5, WORDS, 2) + item(0xFF, struct.pack("<Q", 16)) + item(1, b"")
    text = r"ls\n 01 02 42 18446744073709551611 <fault at 0x10> "
    assert formatted("%bd %*r|", b"\7" + data) == f"7 {text}|"
    assert formatted("%*r|%bd", data + b"\7") == f"{text}|7"
    assert formatted("%*r|", data + b"\x42") == f"{text}|\n<1 byte left: 42>"
    assert formatted("%*r|", item(1, b"a") + item(1, b"b", 2)) == "a|\n<4 bytes left: 01 02 00 62>"
    assert formatted("%*r|", item(0xFF, b"\1")) == "|\n<4 bytes left: ff 01 00 01>"
    assert formatted("%*r|", b"") == "|"
    assert formatted("%*s %*r|", item(1, b"a", 2)) == "a <missing 1 byte> |"
    assert formatted("%*r", b"\5\0\1\0\0\0\x2a", word_size=4, byte_order="big") == "42"
    assert values("%*r %r", data + b"\x42") == (data, b"\x42")


def test_bytes_are_skipped() -> None:
    assert formatted("%+2%bd%+1", b"\1\2\3\4") == "3"
    assert formatted("%+2%bd%+1%*s", b"\1\2\3\4" + item(1, b"x")) == "3x"
    assert formatted("%bd %+4", b"\1\2") == "1 <missing 3 bytes>\n<1 byte left: 02>"


@pytest.mark.parametrize(
    ("item_name", "text"),
    [
        ("major", "1"),
        ("minor", "1"),
        ("cpu", "3"),
        ("pid", "42"),
        ("tid", "43"),
        ("uid", "1000"),
        ("name", r"my prog\x1b"),
        ("cs", "0x33"),
        ("ip", "0x7f0000001234"),
        ("ss", "0x2b"),
        ("sp", "0x7ffc00000010"),
        ("time", "1.000002"),
    ],
)
def test_header_items(item_name: str, text: str) -> None:
    header = {
        "cpu": 3,
        "pid": 42,
        "tid": 43,
        "uid": 1000,
        "process_name": "my prog\x1b",
        "cs": 0x33,
        "ip": 0x7F0000001234,
        "ss": 0x2B,
        "sp": 0x7FFC00000010,
        "time": 1_000_002_000,
    }
    assert formatted(f"%{{{item_name}}}", b"", **header) == text
    assert formatted(f"[%20{{{item_name}}}]", b"", **header) == f"[{text:>20}]"
    assert formatted(f"[%-20{{{item_name}}}]", b"", **header) == f"[{text:<20}]"
    if item_name not in ("major", "minor"):
        assert formatted(f"%{{{item_name}}}", b"") == f"<no {item_name}>"


def test_the_time_is_that_of_the_day() -> None:
    from dprobes.formatters.templates.template_renderer import render
    from dprobes.record.log_record import LogRecord

    template = template_of('fmt = "%{time}"')
    record = LogRecord(major=1, minor=1, time=1_000_002_999)
    assert render(template, record, wall_offset=1_700_000_000_000_000_000) == "1700000001.000002"


@pytest.mark.parametrize("conversion", ["s", "h", "d", "bx", "c", "p", "a"])
def test_a_fault_is_shown_and_formatting_goes_on(conversion: str) -> None:
    data = item(0xFF, struct.pack("<Q", 0xDEAD0)) + item(0xFE, struct.pack("<Q", 0x2B)) + struct.pack("<q", 7)
    fmt = f"[%*{conversion}] [%*{conversion}] %d"
    assert formatted(fmt, data) == "[<fault at 0xdead0>] [<selector fault at 0x2b>] 7"
    assert values(fmt, data) == (Fault(0xDEAD0), Fault(0x2B, is_selector=True), 7)


@pytest.mark.parametrize("conversion", ["s", "h", "d", "T"])
def test_a_value_of_an_entry_that_was_not_seen_is_no_fault(conversion: str) -> None:
    data = item(0xFF, struct.pack("<q", UNSEEN_ENTRY)) + item(0xFE, struct.pack("<q", UNSEEN_ENTRY))
    fmt = f"[%*{conversion}] [%*{conversion}]"
    assert formatted(fmt, data) == "[<entry not seen>] [<selector fault at 0xfffffffffffff001>]"


def test_what_is_missing_is_said_once_data_has_ended() -> None:
    fmt = "%d %x %*s %s %.3s %bd %r|"
    whole = WORDS + item(1, b"ab") + b"x\0" + b"yyy" + b"\1"
    assert formatted(fmt, whole) == "42 fffffffffffffffb ab x yyy 1 |"
    assert formatted(fmt, whole[:-1]) == "42 fffffffffffffffb ab x yyy <missing 1 byte> |"
    assert (
        formatted(fmt, whole[:-3]) == "42 fffffffffffffffb ab x <missing 2 bytes> <missing 1 byte> |\n<1 byte left: 79>"
    )
    assert formatted(fmt, whole[:21]) == (
        "42 fffffffffffffffb ab <missing string> <missing 3 bytes> <missing 1 byte> |"
    )
    assert formatted(fmt, whole[:20]) == (
        "42 fffffffffffffffb a <missing 1 byte> <missing string> <missing 3 bytes> <missing 1 byte> |"
    )
    assert formatted(fmt, whole[:18]) == (
        "42 fffffffffffffffb <missing item: 01 begins none> <missing string> <missing 3 bytes> <missing 1 byte> |\n"
        "<2 bytes left: 01 02>"
    )
    assert formatted(fmt, whole[:11]) == (
        "42 <missing 5 bytes> <missing item> <missing string> <missing 3 bytes> <missing 1 byte> |\n"
        "<3 bytes left: fb ff ff>"
    )
    assert values(fmt, whole[:11]) == (42, None, None, None, None, None, b"")


def test_what_is_no_item_ends_the_reading() -> None:
    data = b"\x42\1\0x"
    assert formatted("%*s %bd", data) == "<missing item: 42 begins none> <missing 1 byte>\n<4 bytes left: 42 01 00 78>"
    assert values("%*s %bd", data) == (None, None)


def test_bytes_of_an_item_that_make_no_element_are_shown_in_their_place() -> None:
    data = item(0, b"\1\0\0\0\2\3") + b"\5"
    assert formatted("%*dx|%bd", data) == "1 <2 bytes left: 02 03>|5"
    assert values("%*dx|%bd", data) == ((1,), 5)


def test_a_cut_item_is_shown_as_far_as_it_is_there() -> None:
    assert formatted("%*bx|", item(0, b"\1\2", 5)) == "1 2 <missing 3 bytes>|"
    assert formatted("%*x|", item(5, WORDS[:12], 3)) == "2a <4 bytes left: fb ff ff ff> <missing 12 bytes>|"
    assert formatted("%*s|", item(0xFF, b"\1\2\3", 8)) == "<3 bytes left: 01 02 03> <missing address of a fault>|"
    assert formatted("%*s|", item(0xFF, b"\1\2\3")) == "<3 bytes left: 01 02 03> <missing address of a fault>|"


def test_what_no_place_holder_takes_is_shown_in_a_line_of_its_own() -> None:
    assert formatted("%bd", b"\1\2\3\4") == "1\n<3 bytes left: 02 03 04>"
    assert formatted("none", b"\1") == "none\n<1 byte left: 01>"


def test_text_is_made_harmless_but_for_its_lines() -> None:
    assert formatted(r"a\tb\nc\x1b\\\"", b"") == 'a\tb\nc\\x1b\\"'


def test_desc_comes_first() -> None:
    from dprobes.formatters.templates.template_renderer import render
    from dprobes.record.log_record import LogRecord

    template = template_of('desc = "100% %d"\nfmt = "%bd"\nfmt = ""\nfmt = "%bd"')
    assert render(template, LogRecord(data=b"\1\2")) == "100% %d\n1\n\n2"
    assert render(template_of('desc = "nothing"'), LogRecord()) == "nothing"
    assert render(template_of(""), LogRecord()) == ""
    assert render(template_of(""), LogRecord(data=b"\1")) == "<1 byte left: 01>"


def test_a_network_address_has_4_or_16_bytes() -> None:
    new = bytes.fromhex("20010db8000000000000000000000001")
    assert formatted("%*I|", item(0, b"\x7f\0\0\1")) == "127.0.0.1|"
    assert formatted("%*-12I|", item(0, new)) == "2001:db8::1 |"
    assert formatted("%*I", item(7, struct.pack("<Q", 0x0100007F), 1)) == "127.0.0.1"
    assert formatted("%*I", b"\7\0\1" + struct.pack(">Q", 0x7F000001), byte_order="big") == "127.0.0.1"
    assert formatted("%*I", item(0xFF, WORDS[:8])) == "<fault at 0x2a>"
    assert values("%(peer)*I", item(0, new)) == ("2001:db8::1",)
    assert formatted("%*I", item(0, b"abc")) == "<3 bytes left: 61 62 63>"


def test_a_network_address_is_an_item() -> None:
    assert "'I' prints an item as a network address" in problems_of("%I")
    assert "hint: write '%*I', or '%*-15I'" in problems_of("%*.3I")

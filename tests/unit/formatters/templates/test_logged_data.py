"""What handlers log, formatted by the templates that are written for them, against plain Python."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dprobes.formatters.templates.data_extraction import Fault, decode_fields
from dprobes.formatters.templates.template_renderer import render
from dprobes.testing import FakeContext, record_of, run_handler
from unit.formatters.templates.support import template_of

NOWHERE = 0x9000_0000


@dataclass
class Step:
    """One thing that a handler logs: instructions, place-holders, what they print, and their values."""

    code: list[str]
    fmt: str
    text: str
    values: tuple[Any, ...]


def words(draw: st.DrawFn, size: int) -> Step:
    """``log <count>``: the top of the stack is logged first."""
    bits = 8 * size
    numbers = draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=1, max_size=4))
    letters = draw(st.lists(st.sampled_from("duxop"), min_size=len(numbers), max_size=len(numbers)))
    strings = []
    values = []
    for number, letter in zip(numbers, letters, strict=True):
        signed = number - (1 << bits) if number >> (bits - 1) else number
        values.append(signed if letter == "d" else number)
        strings.append(
            {"d": str(signed), "u": str(number), "x": f"{number:x}", "o": f"{number:o}", "p": hex(number)}[letter]
        )
    code = [f"push {number:#x}" for number in reversed(numbers)]
    fmt = " ".join(f"%{letter}" for letter in letters)
    return Step([*code, f"log {len(numbers)}"], fmt, " ".join(strings), tuple(values))


def string(draw: st.DrawFn, memory: bytearray) -> Step:
    """``log str``: up to the NUL, or to the limit."""
    text = draw(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20))
    limit = draw(st.integers(0, 30))
    address = 0x1000 + len(memory)
    memory += text.encode() + b"\0"
    return Step([f"push {limit}", f"push {address:#x}", "log str"], "%*s", text[:limit], (text[:limit],))


def memory_item(draw: st.DrawFn, memory: bytearray) -> Step:
    """``log mrf``: bytes as they are."""
    data = draw(st.binary(max_size=40))
    address = 0x1000 + len(memory)
    memory += data
    code = [f"push {len(data)}", f"push {address:#x}", "log mrf"]
    match draw(st.sampled_from(("bx", "wd", "c", "h"))):
        case "bx":
            return Step(code, "%*02bx", data.hex(" "), (tuple(data),))
        case "wd":
            odd = data[len(data) // 2 * 2 :]
            numbers = struct.unpack(f"<{len(data) // 2}h", data[: len(data) // 2 * 2])
            left = f" <1 byte left: {odd.hex()}>" if odd else ""
            return Step(code, "%*wd", " ".join(map(str, numbers)) + left, (numbers,))
        case "c":
            return Step(
                code, "%*c", "".join(c if c.isprintable() else escape(c) for c in map(chr, data)), (tuple(data),)
            )
        case _:
            return Step(code, "%*h", "\n" + dump(data) if data else "", (data,))


def escape(character: str) -> str:
    return {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\0": r"\0"}.get(character) or f"\\x{ord(character):02x}"


def dump(data: bytes) -> str:
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        shown = "".join(f"{byte:02x}" + " " * (n % 4 == 3) for n, byte in enumerate(row))
        ascii_column = "".join(chr(byte & 127) if 32 <= byte & 127 <= 126 else "." for byte in row)
        lines.append(f"0x{at:08x} : {shown:36}: {ascii_column}")
    return "\n".join(lines)


def stack(draw: st.DrawFn, size: int) -> Step:
    """``log``: a count, then words."""
    numbers = draw(st.lists(st.integers(0, (1 << (8 * size)) - 1), max_size=4))
    code = [*(f"push {number:#x}" for number in reversed(numbers)), f"push {len(numbers)}", "log"]
    return Step(code, "%*u", " ".join(map(str, numbers)), (tuple(numbers),))


def variables(draw: st.DrawFn) -> Step:
    """``log lv``: a range of them."""
    numbers = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=4))
    code = [line for n, number in enumerate(numbers) for line in (f"push {number}", f"pop lv, {n}")]
    code += ["push 0", f"push {len(numbers)}", "log lv"]
    return Step(code, "%*3d", " ".join(f"{number:3}" for number in numbers), (tuple(numbers),))


def fault(draw: st.DrawFn, number: int) -> Step:
    """A memory item that cannot be read: the exception is caught, and the handler goes on."""
    what = draw(st.sampled_from(("log str", "log mrf")))
    address = NOWHERE + draw(st.integers(0, 0xFFF))
    code = [f"sx caught{number}", "push 8", f"push {address:#x}", what, f"caught{number}:", "ux"]
    fmt = draw(st.sampled_from(("%*s", "%*bx", "%*h", "%*d", "%*a")))
    return Step(code, fmt, f"<fault at {address:#x}>", (Fault(address),))


@st.composite
def handlers(draw: st.DrawFn) -> tuple[FakeContext, str, list[Step]]:
    machine = draw(st.sampled_from(("x86_64", "i386")))
    size = 8 if machine == "x86_64" else 4
    memory = bytearray()
    steps = []
    for number in range(draw(st.integers(0, 6))):
        match draw(st.integers(0, 5)):
            case 0:
                steps.append(words(draw, size))
            case 1:
                steps.append(string(draw, memory))
            case 2:
                steps.append(memory_item(draw, memory))
            case 3:
                steps.append(stack(draw, size))
            case 4:
                steps.append(variables(draw))
            case _:
                steps.append(fault(draw, number))
    context = FakeContext(machine, memory={0x1000: bytes(memory) or b"\0"}, local_variables=[0] * 4)
    text = "\n".join(line for step in steps for line in step.code)
    return context, f"{text}\nexit", steps


@given(handlers())
def test_records_of_handlers(case: tuple[FakeContext, str, list[Step]]) -> None:
    context, code, steps = case
    record = record_of(run_handler(code, context, logmax=4096), context)
    assert record is not None
    template = template_of("\n".join(f'fmt = "- {step.fmt}"' for step in steps))
    assert render(template, record) == "\n".join(f"- {step.text}" for step in steps)
    decoded = decode_fields(template, record)
    assert decoded.values == tuple(value for step in steps for value in step.values)

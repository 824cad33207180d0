"""Handlers that write: what they wrote is what the program finds; what it may not write is a fault and unchanged."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from integration.support import symbols_of

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

EITHER = pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])


def run_writes(build: Builder, run: Runner, source: str, *arguments: str, i386: bool = False) -> Result:
    program = build("writes.c", i386=i386)
    result = run("name = writes\n" + source, ["--exit-status", "--", str(program), *arguments], ["--allow-write"])
    assert result.status == 0, result.stderr
    return result


def shown(result: Result, what: str) -> str:
    return "|".join(re.findall(rf"^{what} (.*)$", result.stdout, re.MULTILINE))


@EITHER
def test_a_written_register_is_what_a_stepped_and_an_emulated_instruction_work_on(
    build: Builder, run: Runner, i386: bool
) -> None:
    register = "ebx" if i386 else "rdi"
    handler = f"push r, {register}\npush 0x1122334455\n" if not i386 else f"push r, {register}\npush 0x22334455\n"
    handler += f"pop r, {register}\npush u, {register}\npush 1\nadd\npop u, {register}\nlog 1\nexit\n"
    places = "".join(f"offset = {name}\nminor = {n}\n{handler}" for n, name in enumerate(("stepped", "emulated"), 1))
    result = run_writes(build, run, places, i386=i386)
    expected = "22334456" if i386 else "1122334456"
    assert (shown(result, "stepped"), shown(result, "emulated")) == (expected, expected)
    assert result.words(size=4 if i386 else 8) == [[5], [5]]


def store(handler: str) -> str:
    """Return a program whose handler stores something at the address that ``store`` got; faults are recorded."""
    return f"vars = 3\noffset = store\nminor = 1\nsx fault\n{handler}exit\nfault: log 3\nexit\n"


@pytest.mark.parametrize("size", [8, 16, 32, 64])
@EITHER
def test_memory_is_written_whole_or_not_at_all(build: Builder, run: Runner, size: int, i386: bool) -> None:
    value = 0x8877665544332211 & ((1 << size) - 1)
    pushes = f"push {value}\n"
    if i386 and size == 64:
        pushes = f"push {value >> 32}\npush {value & 0xFFFFFFFF}\n"
    result = run_writes(build, run, store(f"push r, arg0\n{pushes}pop mem, u{size}\n"), i386=i386)
    assert result.words(size=4 if i386 else 8) != []
    written = value.to_bytes(size // 8, "little")

    def expected(before: bytes, at: int, count: int) -> str:
        return (before[:at] + written + before[at + len(written) :])[:count].hex(" ")

    plain, fits = bytes([0x11] * 10), size <= 16
    assert shown(result, "within") == expected(plain, 1, 10)
    assert shown(result, "across") == expected(plain, 1, 10)
    assert shown(result, "read-only") == (expected(plain, 1, 10) if fits else plain.hex(" "))
    assert shown(result, "none") == (expected(plain, 1, 4) if fits else plain[:4].hex(" "))
    beyond = bytes([0x22] * 4)
    assert shown(result, "beyond") == (expected(beyond, 1, 4) if fits else beyond.hex(" "))
    pages, file = (int(word) for word in shown(result, "pages").split())
    faults = [words for words in result.words(size=4 if i386 else 8) if words]
    page = 4096
    bad = [pages + 2 * page, pages + 2 * page + 8, pages + 4 * page, file + page, 0]
    if fits:
        bad = [pages + 2 * page + 8, 0]
    assert faults == [[1, address, 0] for address in bad]


def test_a_write_under_a_breakpoint_changes_the_instruction_and_keeps_the_breakpoint(
    build: Builder, run: Runner
) -> None:
    # b8 02 00 00 00 is mov $2, %eax; then 6a 03 58 c3 is push $3, pop %rax, ret.
    source = (
        "offset = patched\nminor = 1\npush patched\npush mem, u64\nlog 1\nexit\n"
        "offset = store\nminor = 2\npush patched\npush 0xc358036a\npop mem, u32\nexit\n"
    )
    program = build("writes.c")
    result = run_writes(build, run, source, "code")
    assert shown(result, "patched") == "1|3|3"
    before = program.read_bytes()[symbols_of(program)["patched"] :][:8]
    after = bytes.fromhex("6a0358c3") + before[4:]
    assert [bytes.fromhex(r["data"]) for r in result.records if r["minor"] == 1] == [before, after, after]
    assert result.counts[1].hits == 3


def test_a_handler_that_runs_again_after_a_signal_finds_what_it_found_before(build: Builder, run: Runner) -> None:
    source = "offset = enter\nminor = 1\npush r, rdi\npush 1\nadd\npop r, rdi\nexit\n"
    result = run_writes(build, run, source, "with", "signals")
    assert shown(result, "wrong") == "0 1"
    assert result.counts[1].hits == 3000


def test_writing_needs_the_users_permission(build: Builder, run: Runner) -> None:
    program = build("writes.c")
    for statement in ("pop r, rax", "pop u, rax", "pop mem, u8"):
        result = run(f"name = writes\noffset = store\npush 0\npush 0\n{statement}\nexit\n", ["--", str(program)])
        assert result.status == 2
        assert f"'{statement}' writes to the target" in result.stderr
        assert "hint: allow it with --allow-write" in result.stderr
        assert result.stdout == ""

"""Segmented addresses are what the processor makes of them: bases, limits, rights, and selectors that are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

SEG_FAULT, INVALID_ADDR = 2, 1
FAULTS = {"gp": SEG_FAULT, "pf": INVALID_ADDR}

SOURCE = """
name = segments
offset = convert
minor = 1
sx fault; push r, arg0; push r, arg1; seg2lin; log 1; exit
fault: log 3; exit
offset = fetch
minor = 2
sx fault; push r, arg0; push r, arg1; push dis; push r, arg0; push r, arg1; vsa; log 2; exit
fault: log 3; push r, arg0; push r, arg1; vsa; log 1; exit
offset = store
minor = 3
sx fault; push r, arg0; push r, arg1; push 0x4241; pop wis; exit
fault: log 3; exit
offset = loading
minor = 4
sx fault; push r, ebx; pop r, fs; push r, fs; log 1; exit
fault: log 3; push r, fs; log 1; exit
"""


BAD = ("kernel", "unknown", "local-unknown", "local-execute-only", "local-not-present", "local-beyond")
"""The selectors that a segment register cannot hold."""


def run_segments(build: Builder, run: Runner, *arguments: str) -> Result:
    program = build("segments.c", i386=True)
    result = run(SOURCE, ["--exit-status", "--", str(program), *arguments], ["--allow-write"])
    assert result.status == 0, result.stderr
    return result


def faults(seen: str, offset: int, size: int) -> set[int]:
    """
    Return the exceptions that an access may raise where the processor has seen this fault.

    Which of the two it is where an access wraps around the end of a flat segment differs between processors (Intel SDM,
    volume 3, "Limit checking": implementation-specific if the effective limit is 0xffffffff).
    """
    return set(FAULTS.values()) if offset + size > 1 << 32 else {FAULTS[seen]}


@pytest.mark.parametrize("arguments", [(), ("ldt",)], ids=["gdt", "ldt"])
def test_an_i386_program_sees_the_same(build: Builder, run: Runner, arguments: tuple[str, ...]) -> None:
    result = run_segments(build, run, *arguments)
    rows = [line.split() for line in result.stdout.splitlines()]
    accesses = [row for row in rows if row[0] != "load"]
    assert len(accesses) >= 150
    logs = {minor: result.words(minor, size=4) for minor in (1, 2, 3, 4)}
    assert [len(logs[minor]) for minor in (1, 2, 3)] == [len(accesses)] * 3
    for row, converted, fetched, stored in zip(accesses, logs[1], logs[2], logs[3], strict=True):
        name, (selector, base, offset) = row[0], (int(word) for word in row[1:4])
        byte, word, held, write = row[4:]
        if byte == "gp" and not (name == "local-execute-only" and offset <= 15):
            assert converted == [SEG_FAULT, selector, 0], row
        else:
            assert converted == [(base + offset) & 0xFFFFFFFF], row
        if word in FAULTS:
            assert fetched[0] in faults(word, offset, 4), row
            assert fetched[3] == (byte in FAULTS), row
            assert fetched[0] == FAULTS["pf"] or fetched[1] == selector, row
        else:
            assert fetched == [0, int(word)], row
        if write in FAULTS:
            assert stored[0] in faults(write, offset, 2), row
            assert stored[0] == FAULTS["pf"] or stored[1] == selector, row
            assert held != str(0x4241), row
        else:
            assert stored == [], row
            assert held in (str(0x4241), "-"), row


def test_a_local_table_that_cannot_be_asked_for_is_a_fault_and_a_warning(build: Builder, run: Runner) -> None:
    result = run_segments(build, run, "ldt", "filtered")
    rows = [line.split() for line in result.stdout.splitlines() if not line.startswith("load")]
    converted = dict(zip((tuple(row[:4]) for row in rows), result.words(1, size=4), strict=True))
    local = {row: words for row, words in converted.items() if row[0].startswith("local")}
    assert local
    assert all(words == [SEG_FAULT, int(row[1]), 0] for row, words in local.items())
    warning = "the local descriptor table of process {} cannot be read: a seccomp filter or a shadow stack prevents"
    assert result.stderr.count(warning.format(result.records[0]["pid"])) == 1


def test_a_loaded_selector_takes_effect_and_a_bad_one_changes_nothing(build: Builder, run: Runner) -> None:
    result = run_segments(build, run, "ldt")
    rows = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("load ")]
    for (name, wanted, found, value), logged in zip(rows, result.words(4, size=4), strict=True):
        if name in BAD:
            assert (found, value, logged) == ("0", "gp", [SEG_FAULT, int(wanted), 0, 0]), name
        else:
            # The kernel makes no difference between null selectors when it loads one.
            assert found == wanted or name == "null-3", name
            assert logged == [int(wanted)]
    values = {name: value for name, _, _, value in rows}
    assert values["area"] == values["local"] == values["local-pages"] != "gp"


def test_64_bit_code_knows_the_bases_of_fs_and_gs_only(build: Builder, run: Runner) -> None:
    # The thread's control block begins with its own address (System V AMD64 ABI, thread-local storage).
    handler = (
        "push r, fs_base; push r, fs_base; push mem, u64; push r, gs_base; log 3\n"
        "push r, ss; push look; seg2lin; push r, ds; push look; push dis; push r, cs; push look; vsa\n"
        "push look; push mem, u32; push look; log 5\n"
        "sx bad; push 0x7b; push 0; seg2lin; exit\nbad: log 3\n"
    )
    result = run.command(f"name = memory\noffset = look\nminor = 1\n{handler}exit\n", build("memory.c"))
    for words in result.words():
        assert words[0] == 0
        assert words[1] == words[2] != 0
        look, code, invalid, byte, flat = words[3:8]
        assert (look, code, invalid) == (flat, byte, 0)
        assert words[8:] == [SEG_FAULT, 0x7B, 0]


SELECTORS = [
    (register, selector, good)
    for register in ("ds", "es", "fs", "gs")
    for selector, good in ((0x2B, True), (0, True), (0x28, False), (0x33, True), (0xFFFF, False), (0x7B, False))
    if register != "fs" or not good  # the C library lives on the base of fs
]


def test_64_bit_code_takes_only_selectors_that_the_kernel_takes(build: Builder, run: Runner) -> None:
    source = "name = memory\nvars = 1\noffset = look\nminor = 1\n"
    for register, selector, _ in SELECTORS:
        label = f"{register}_{selector:x}"
        source += f"sx {label}; push {selector}; pop r, {register}; push r, {register}; log 1; jmp after_{label}\n"
        source += f"{label}: log 3\nafter_{label}: nop\n"
    source += "push 0; pop u, ds; push 0; pop u, es; push 0; pop u, gs; exit\n"
    program = build("memory.c")
    result = run(source, ["--exit-status", "--", str(program)], ["--allow-write"])
    assert result.status == 0, result.stderr
    for words in result.words():
        assert words == [n for _, sel, good in SELECTORS for n in ([sel] if good else [SEG_FAULT, sel, 0])]

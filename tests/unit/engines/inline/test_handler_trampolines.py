"""The code of trials: what it is, and where it may stop."""

from __future__ import annotations

import pytest
from iced_x86 import Decoder, Formatter, FormatterSyntax

from dprobes.engines.inline.handler_trampolines import TrialCode, size_bound
from dprobes.engines.inline.handler_trials import Trial, trial_of
from dprobes.native.x86.x86_assembler import Gpr, X86Assembler

HERE, SITE = 0x2000, 0x1000
MASKS = ["stmxcsr [rsp+0A8h]", "mov eax,[rsp+0A8h]", "and eax,1F80h", "cmp eax,1F80h", "je L", "int3"]
TARGET = ["mov [rsp+0A8h],rax", "shl rax,10h", "sar rax,10h", "cmp rax,[rsp+0A8h]", "je L", "int3"]
SAVED_RAX = "mov rax,[rsp+50h]"


def made(raw: str, *, keeps_flags: bool = False) -> tuple[TrialCode, list[str], list[str]]:
    """Return the trial of an instruction, its code, and the instructions of it that may stop."""
    trial = trial_of(bytes.fromhex(raw))
    assert isinstance(trial, Trial)
    code, asm = TrialCode(trial, SITE), X86Assembler(HERE)
    code.touch_stack(asm)
    code.write(asm, keeps_flags=keeps_flags)
    data = asm.assemble()
    assert len(data) <= size_bound(trial)
    formatter, lines, places = Formatter(FormatterSyntax.INTEL), [], {}
    for instruction in Decoder(64, data, ip=HERE):
        text = formatter.format(instruction)
        lines.append(f"{text.split()[0]} L" if text.startswith("j") else text)
        places[instruction.ip] = lines[-1]
    assert lines[0] == "mov [rsp-2D0h],rax"
    return code, lines[1:], [places[stop.place] for stop in code.stops][1:]


@pytest.mark.parametrize(
    ("raw", "lines", "stops"),
    [
        ("488b07", ["mov rax,[rdi]"], [0]),
        ("64488b042528000000", ["mov rax,fs:[28h]"], [0]),
        ("f30f1000", [SAVED_RAX, "mov eax,[rax]"], [1]),  # movss xmm0, [rax]
        ("f30f6f07", ["movzx eax,byte ptr [rdi]", "movzx eax,byte ptr [rdi+0Fh]"], [0, 1]),  # movdqu xmm0, [rdi]
        ("880437", ["lock cmpxchg [rdi+rsi],al"], [0]),  # mov [rdi+rsi], al
        ("48890f",  # mov [rdi], rcx
         ["lock cmpxchg [rdi],al", "lea rax,[rdi]", "and eax,0FFFh", "cmp eax,0FF8h", "jbe L",
          "lock cmpxchg [rdi+7],al"], [0, 5]),
        ("6448890f", ["lock cmpxchg fs:[rdi],al", "lock cmpxchg fs:[rdi+7],al"], [0, 1]),
        ("8b0ccc", ["mov eax,[rsp+rcx*8+130h]"], [0]),  # mov ecx, [rsp+rcx*8]
        ("660f6f00",  # movdqa xmm0, [rax]
         [SAVED_RAX, "lea rax,[rax]", "test eax,0Fh", "je L", "int3", SAVED_RAX, "movzx eax,byte ptr [rax]"], [4, 6]),
        ("0f29442410", ["lea rax,[rsp+140h]", "test eax,0Fh", "je L", "int3"], [3]),  # movaps [rsp+16], xmm0
        ("48f7f1", [SAVED_RAX, "div rcx", "mov rdx,[rsp+60h]"], [1]),
        ("48f73c24", [SAVED_RAX, "idiv qword ptr [rsp+130h]", "mov rdx,[rsp+60h]"], [1]),
        ("0f58c1", MASKS, [5]),  # addps xmm0, xmm1
        ("c3", [SAVED_RAX, "mov rax,[rsp+130h]", *TARGET], [7]),
        ("ffe1", [SAVED_RAX, "mov rax,rcx", *TARGET], [7]),  # jmp rcx
        ("ff2500100000", [SAVED_RAX, "mov rax,[2006h]", *TARGET], [7]),  # jmp [rip+0x1000]
    ],
)  # fmt: skip
def test_the_code(raw: str, lines: list[str], stops: list[int]) -> None:
    _, found, places = made(raw)
    assert [line.replace("rip:", "") for line in found] == lines
    assert places == [lines[at] for at in stops]


def test_stops_say_how_to_become_a_hit_of_the_breakpoint() -> None:
    code, _, _ = made("660f6f07", keeps_flags=True)  # movdqa xmm0, [rdi]
    stack, alignment, load = code.stops
    assert [stop.site for stop in code.stops] == [SITE] * 3
    assert (stack.place, stack.is_trap, stack.has_frame) == (HERE, False, False)
    assert (alignment.is_trap, alignment.has_frame, alignment.has_flags) == (True, True, True)
    assert (load.is_trap, load.has_frame, load.has_flags) == (False, True, True)
    assert load.place == alignment.place + 1


def test_what_a_division_changes_is_saved() -> None:
    assert made("48f7f1")[0].changed == {Gpr.RDX}
    assert made("488b07")[0].changed == frozenset()


def test_without_a_trial_it_is_about_the_stack() -> None:
    code, asm = TrialCode(None, SITE), X86Assembler(HERE)
    code.touch_stack(asm)
    before = len(asm)
    code.write(asm, keeps_flags=False)
    assert len(asm) == before
    assert [stop.place for stop in code.stops] == [HERE]
    assert before <= size_bound(None)


def test_how_a_handler_ends_that_stops_the_thread_or_skips_the_function() -> None:
    code, asm = TrialCode(Trial(b"", ends=7), SITE), X86Assembler(HERE)
    code.touch_stack(asm)
    code.write(asm, keeps_flags=False)
    rest = asm.label()
    start = asm.here
    code.write_endings(asm, lambda: asm.raw(b"\x90"), rest)
    asm.place(rest)
    data = asm.assemble()
    formatter = Formatter(FormatterSyntax.INTEL)
    found = {i.ip: formatter.format(i).split()[0] for i in Decoder(64, data[start - HERE :], ip=start)}
    ending = ["cmp", "jne", "nop", "int3", "lea", "jmp"]
    assert [*found.values()] == ["cmp", "je", *ending, *ending, "nop", "lea", "ret"]
    assert [(stop.exit_code, stop.probe, stop.is_trap, found[stop.place]) for stop in code.stops[1:]] == [
        (1, 7, True, "int3"), (3, 7, True, "int3")
    ]  # fmt: skip
    assert code.has_endings
    assert not TrialCode(None, SITE).has_endings
    assert len(data) <= size_bound(Trial(b"", ends=7))

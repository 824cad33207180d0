"""``show --bpf``: handlers as eBPF, with the program's instructions beside."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from dprobes.cli.main import run
from dprobes.engines.ebpf import ebpf_listing

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """\
name = "no-such-module"
vars = 1

offset = main
minor = 1
    push r, arg0
again: inc lv, 0
    loop again
    log 1

offset = main
minor = 2
    push cs
"""

REMARK = "for a kernel with may_goto, sleepable_uprobe: this user lacks CAP_BPF, so nothing was tried"

HEAD = """\
name = "no-such-module"
vars = 1
// {arch}, {word}-byte words; {remark}

offset = main
minor = 1
// eBPF: {count} instructions, 19712 bytes of scratch memory
; around the handler
     0: r6 = r1
     1: r1 = map[probes][0] + 0
     3: r2 = *(u32 *)(r1 + 32)
"""

PARTS = """\
; 0000  push r, arg0  // line 6
     : r1 = *(u64 *)(r6 + 112)
     : *(u64 *)(r7 + 8184) = r1
; 0003  inc lv, 0  // line 7
     : w0 = 0
     : w1 = 0
     : w2 = 0
     : w3 = 0
     : w4 = 0
     : w5 = 0
     : w8 = 0
     : w9 = 0
     : may_goto <exhausted>
     : r1 = map[locals][0] + 0
     : r2 = 1
     : lock *(u64 *)(r1 + 0) += r2
; 0006  loop again  // line 8
     : r1 = *(u64 *)(r7 + 8224)
     : if r1 == 256 goto <raise>
     : r1 += 1
     : *(u64 *)(r7 + 8224) = r1
     : r2 = *(u64 *)(r7 + 8184)
     : r2 -= 1
     : *(u64 *)(r7 + 8184) = r2
     : if r2 != 0 goto <again>
     : goto <behind>
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ebpf_listing, "missing_privilege", lambda: "this user lacks CAP_BPF")
    path = tmp_path / "x.rpn"
    path.write_text(PROGRAM.partition("offset = main\nminor = 2")[0])
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run(["show", "--bpf", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_instructions_stand_beside_what_they_are_compiled_to(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, file, "--arch", "x86_64")
    count = int(re.findall(r"^ *(\d+): ", out, re.MULTILINE)[-1]) + 1
    assert out.startswith(HEAD.format(arch="x86_64", word=8, remark=REMARK, count=count))
    # Numbers and distances aside, which differ with everything that stands around.
    lines = re.sub(r"^ *\d+:", "     :", out[out.index("; 0000") :], flags=re.MULTILINE).splitlines()
    expected = PARTS.splitlines()
    for line, wanted in zip(lines, expected, strict=False):
        pattern = re.sub(r"goto <\w+>$", r"goto [+-]\\d+ <\\d+>", re.escape(wanted).replace(r"\ ", " "))
        assert re.fullmatch(pattern, line), (line, wanted)


def test_the_words_are_those_of_the_processor(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, file, "--arch", "i386")
    assert "// i386, 4-byte words; for a kernel" in out
    # arg0 of an i386 function is on its stack.
    assert "; 0000  push r, arg0  // line 6\n" in out
    assert "r1 = *(u32 *)(r6 + 152)\n" in out


def test_what_cannot_be_compiled_is_said_beside_the_rest(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(PROGRAM.replace("push cs", "push u, fr0"))
    out = shown(capsys, file, "--arch", "x86_64")
    assert "; 0000  push r, arg0" in out
    message = re.escape("// not compiled: 'push u, <register>' at byte ")
    assert re.search(message + r"\d+ of the program cannot be compiled to eBPF\n", out)


def test_handlers_of_other_processors_are_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('name = "no-such-module"\noffset = main\nexit\n')
    assert run(["show", "--bpf", "--arch", "s390x", str(file)]) == 1
    error = capsys.readouterr().err
    assert "error: handlers are compiled to eBPF for i386 and x86_64, not for s390x\n" in error

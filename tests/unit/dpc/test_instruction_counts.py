"""Instructions that a hit executes: what is compiled, beside the same written by hand in RPN, in the examples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_text
from dprobes.preprocessor import preprocess
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.rpn_parser import parse
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare
from dprobes.vm import Interpreter

if TYPE_CHECKING:
    from dprobes.rpn.rpn_program import Program

EXAMPLES = Path(__file__).parents[3] / "examples"
GUIDE = EXAMPLES.parent / "docs" / "reference" / "dpc.md"
FACTOR = 1.3
"""How many times as many instructions a program in C may take."""

OWN = {
    "a counter": ("name = m; vars = 1; offset = f; inc lv, 0; abort", "static long n; f { n++; }"),
    "a condition": (
        "name = m; offset = f; push 400; push r, arg0; ltu; jnz no; ros 1; push r, arg0; log 1; exit; no: abort",
        'f(size) when (size > 400) { printf("%d", size); }',
    ),
    "three fields": (
        (
            "name = m; offset = f; push r, arg0; push 8; add; push mem, u64; push 16; add; push mem, u64; push 5; eq;"
            "jz no; ros 1; push r, arg1; log 1; exit; no: abort"
        ),
        (
            "struct b { long x[2]; long v; }; struct a { long x; struct b *b; };"
            'f(struct a *a, n) when (a->b->v == 5) { printf("%d", n); }'
        ),
    ),
    "a table": (
        "name = m; table = t, hist, comm; offset = f; push r, arg0; tally t; abort",
        "f(x) { @t[comm] = hist(x); }",
    ),
}
"""Handlers of a kind that no example has, in RPN and in C."""

IN_C = {
    "malloc.rpn": 'malloc(size) { printf("%d", size); }',
    "malloc-returns.rpn": 'return malloc { printf("%p", retval); }',
    "bash-lines.rpn": 'maybe_add_history(line) { printf("%s", str(line, 256)); }',
    "host-names.rpn": 'getaddrinfo(node) { printf("%s", str(node, 256)); }',
    "strings.rpn": 'getenv(name) { printf("%s", str(name)); }',
    "busy.rpn": 'percpu long n; f { n++; printf("%d", n); }',
    "page-faults.rpn": 'tracepoint exceptions:page_fault_user { printf("%a %a %x", address, ip, error_code); }',
    "signals-sent.rpn": 'tracepoint s:s { printf("%d %d %s", sig, args.pid, str(comm_, 16)); }',
    "files-opened.rpn": 'return syscall openat { printf("%d %s", retval, str(filename, 255)); }',
    "slow-calls.rpn": (
        "return read(a, b, c) when (elapsed > 10ms) "
        '{ printf("%d %d %d %d %d", a, b, c, elapsed, retval); }'
    ),
    "code-pages.rpn": (
        "static long seen[1024]; f { unsigned page = pc >> 12 & 1023; if (seen[page]) return; seen[page]++; "
        'printf("%a", pc); }'
    ),
}  # fmt: skip


def executed(program: Program) -> int:
    """Return how many instructions a hit executes."""
    processor = architecture("x86_64")
    image = encode(program, processor)
    interpreter = Interpreter(image, processor)
    counter = _Counter(interpreter.steps)
    interpreter.steps = counter  # type: ignore[assignment]
    context = FakeContext(
        "x86_64",
        registers={"rdi": 0x1000, "rsi": 7, "rax": 3, "rip": 0x5000},
        memory={0x1000: bytes(8) + (0x2000).to_bytes(8, "little"), 0x2000: bytes(16) + (5).to_bytes(8, "little")},
        traced_fields={
            **dict.fromkeys(("address", "ip", "error_code", "sig", "pid", "ret"), 5),
            **dict.fromkeys(("filename", "comm", "comm_"), 0x1000),
        },
        time=30_000_000,
        entry={"time": 10_000_000, "rdi": 1, "rsi": 2, "rdx": 3},
    )
    interpreter.run(image.handlers[0], prepare(program, 0, context), context)
    return counter.count


class _Counter:
    def __init__(self, steps: Any) -> None:
        self._steps = steps
        self.count = 0

    def __getitem__(self, offset: int) -> Any:
        self.count += 1
        return self._steps[offset]


def in_rpn(text: str) -> Program:
    diagnostics = Diagnostics()
    program = parse_source(SourceFile("a.rpn", text), diagnostics, CompileOptions())
    diagnostics.raise_if_errors()
    return program


def in_c(text: str) -> Program:
    diagnostics = Diagnostics()
    source = preprocess(SourceFile("a.dpc", text), diagnostics)
    (compilation,), _ = compile_text(source, diagnostics, module="m")
    program = parse(compilation.preprocessed(), diagnostics)
    diagnostics.raise_if_errors()
    assert program is not None
    return program


def counts() -> dict[str, tuple[int, int]]:
    """Return how many instructions both take, by names."""
    found = {name: (in_rpn((EXAMPLES / name).read_text()), in_c(text)) for name, text in IN_C.items()}
    found |= {name: (in_rpn(rpn + chr(10)), in_c(text)) for name, (rpn, text) in OWN.items()}
    return {name: (executed(rpn), executed(c)) for name, (rpn, c) in found.items()}


def test_programs_in_c_execute_hardly_more_instructions() -> None:
    found = counts()
    slow = {name: pair for name, pair in found.items() if pair[1] > FACTOR * pair[0]}
    assert not slow, found
    assert sum(c for _, c in found.values()) <= 1.15 * sum(rpn for rpn, _ in found.values()), found


def test_the_guide_has_these_counts() -> None:
    rows = {
        cells[1].strip().strip("`"): (int(cells[2]), int(cells[3]))
        for line in GUIDE.read_text().splitlines()
        if len(cells := line.split("|")) == 5 and cells[2].strip().isdigit()
    }
    assert rows == counts()


def test_what_is_optimised_away() -> None:
    """Nothing of these is left but what has an effect, and their values stay the same."""
    for text, most in (
        ("static long n; f(x) { if (0) n = x; if (2 > 1) n++; while (0) n--; }", 2),
        ("static long n; f(x) { n = x * 8 + 0; }", 4),
        ("static unsigned long n; f(unsigned long x) { n = x / 16 % 4; }", 5),
        ("static long n; f(x) { n = sizeof(int) * 4 - 1 << 2; }", 3),
        ("static int n; f(unsigned x) { n = (x & 255) >> 4; }", 5),
    ):
        assert executed(in_c(text)) <= most, (text, executed(in_c(text)))

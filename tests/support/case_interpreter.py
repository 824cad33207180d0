"""Runs of a case: by the interpreter, as a Python function, compiled to eBPF, and as machine code."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.arch.usdt_arguments import parse_arguments
from dprobes.bpf.lower import LoopForm
from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_text
from dprobes.errors import SourceError, TargetError
from dprobes.extensions import Extension
from dprobes.formatters.templates.template_collection import templates_in
from dprobes.formatters.templates.template_renderer import render
from dprobes.keyed.table_text import table_lines
from dprobes.preprocessor import preprocess
from dprobes.record.log_record import LogRecord
from dprobes.record.record_origin import Place
from dprobes.rpn.compilation_passes import CompileOptions, check_program, parse_source
from dprobes.rpn.instruction_encoding import CodeImage, encode
from dprobes.rpn.rpn_parser import parse
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare, run_definition
from dprobes.vm import Ending
from dprobes.vm.translate import Translator
from support.case_format import encode_items
from support.ebpf_abilities import is_applicable, loop_forms
from support.ebpf_backend import EbpfRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.bpf.lower import Abilities
    from dprobes.dpc.emitters.program_emitter import Compilation
    from dprobes.extensions import View
    from dprobes.rpn.rpn_program import Program
    from dprobes.vm.rpn_machine import Machine, Outcome
    from support.case_format import Case, ContextLine, Target
    from support.ebpf_backend import FinalState

__all__ = [
    "check_a64_case",
    "check_case",
    "check_compiled_case",
    "check_native_case",
    "check_translated_case",
    "compile_case",
    "context_of",
    "is_compiled_case",
    "is_native_case",
]


def check_case(case: Case, target: Target) -> None:
    """Compile a case, interpret it, and compare all its expectations; raise AssertionError at a difference."""
    program, diagnostics = compile_case(case, target)
    expected = case.text("diagnostics", target)
    if expected is not None:
        assert diagnostics.render() == expected
    if not case.is_run:
        return
    assert program is not None, diagnostics.render()
    context = context_of(case, target)
    for _ in range(case.hits):
        machine = run_definition(program, 0, context)
    _compare(case, target, encode(program, architecture(target.architecture)), context, machine.outcome(), machine)


def check_translated_case(case: Case, target: Target) -> None:
    """
    Compare a case with its handler translated to Python.

    A second run gives the final state of the machine, which is compared as well.
    """
    program, _ = compile_case(case, target)
    if not case.is_run:
        return
    assert program is not None
    image = encode(program, architecture(target.architecture))
    translator = Translator(image, architecture(target.architecture))
    context, looked_at = context_of(case, target), context_of(case, target)
    for _ in range(case.hits):
        point = prepare(program, 0, context)
        outcome = translator.run(image.handlers[0], point, context)
        machine = translator.final_state(image.handlers[0], prepare(program, 0, looked_at), looked_at)
    _compare(case, target, image, context, outcome, machine)
    _compare(case, target, image, looked_at, machine.outcome(), machine)


def check_compiled_case(
    case: Case, target: Target, runner_of: Callable[..., EbpfRunner] = EbpfRunner, forms: Sequence[LoopForm] = ()
) -> None:
    """
    Compare a case with its handler compiled to eBPF, in each of ``forms``.

    An empty sequence means all forms of loops that this kernel supports. ``runner_of`` creates the runner.
    """
    program, _ = compile_case(case, target)
    assert program is not None
    processor = architecture(target.architecture)
    image = encode(program, processor)
    for loops in forms or loop_forms():
        context = context_of(case, target)
        point = prepare(program, 0, context)
        with runner_of(image, processor, context, loops) as runner:
            for _ in range(case.hits):
                outcome, state = runner.run(image.handlers[0], point)
        _compare(case, target, image, context, outcome, state)


def check_native_case(case: Case, target: Target) -> None:
    """Compare a case with its handler compiled to machine code of x86-64."""
    from support.native_backend import NativeRunner

    check_compiled_case(case, target, NativeRunner, [LoopForm.MAY_GOTO])


def check_a64_case(case: Case, target: Target) -> None:
    """Compare a case with its handler compiled to machine code of AArch64, whatever processor ``target`` is."""
    from support.a64_backend import A64Runner

    check_compiled_case(case, target, A64Runner, [LoopForm.MAY_GOTO])


def is_native_case(case: Case, target: Target) -> bool:
    """Return whether a case can be compiled to machine code."""
    from support.native_backend import NATIVE

    return is_compiled_case(case, target, NATIVE)


def is_compiled_case(case: Case, target: Target, offered: Abilities | None = None) -> bool:
    """
    Return whether a case has a handler to run, and can be compiled to eBPF of a uprobe.

    ``offered`` are the abilities to assume, by default those of this kernel.
    """
    if not case.is_run or target.architecture not in ("i386", "x86_64"):
        return False
    program, _ = compile_case(case, target)
    if program is None:
        return False
    return is_applicable(program, architecture(target.architecture), context_of(case, target), offered)


@functools.cache
def compile_case(case: Case, target: Target) -> tuple[Program | None, Diagnostics]:
    """
    Return the checked program of a case and the compiler's diagnostics; None instead of a program with errors.

    The result is cached for all back ends.
    """
    diagnostics = Diagnostics()
    options = CompileOptions(allow_write=case.allow_write)
    try:
        if case.is_c:
            program = parse(compile_c(case, target, diagnostics).preprocessed(), diagnostics)
            diagnostics.raise_if_errors()
            assert program is not None
        else:
            program = parse_source(SourceFile("case.rpn", case.program), diagnostics, options)
        check_program(program, architecture(target.architecture), diagnostics, options)
    except SourceError:
        return None, diagnostics
    return program, diagnostics


class MadeUpPlaces:
    """
    The source lines and calls of a simulated module.

    ``work`` has a line at each second instruction, and calls of the inlined function ``inner`` in two places.
    """

    def of_lines(self, module: str, path: str, first: int, last: int) -> dict[int, list[str]]:
        """Return an instruction for each even line of the file ``case.c``, two for line 8."""
        if path != "case.c":
            raise TargetError(f"no source file '{path}' is known to the debug information of '{module}'")
        found = {line: [f"work+{line:#x}"] for line in range(first, last + 1) if not line % 2}
        if 8 in found:
            found[8].append("work+0x80")
        if not found:
            raise TargetError(f"line {first} of 'case.c' has no instructions", hint="the nearest is the next one")
        return found

    def of_inlined(self, module: str, function: str) -> list[str]:
        """Return the places of the inlined calls of ``inner``; raise ``TargetError`` for other functions."""
        if function != "inner":
            raise TargetError(f"no call of '{function}' was inlined in '{module}'")
        return ["work+0x24", "0x1234"]


def compile_c(case: Case, target: Target, diagnostics: Diagnostics) -> Compilation:
    """Return the RPN source of a case in DProbes C; raise ``SourceError`` if it has errors."""
    text = preprocess(SourceFile("case.dpc", case.program), diagnostics)
    diagnostics.raise_if_errors()
    (compilation,), _ = compile_text(
        text, diagnostics, module="case", word_size_of=lambda _module: target.word_size, allow_write=case.allow_write,
        places=MadeUpPlaces(),
    )  # fmt: skip
    return compilation


def _printed(case: Case, target: Target, outcome: Outcome) -> str:
    """Return the text of the first record of a case in DProbes C, as its printf formats it."""
    compilation = compile_c(case, target, Diagnostics())
    template = templates_in(compilation.template_file, compilation.major)[outcome.minor]
    record = LogRecord(
        outcome.major, outcome.minor, process_name="case", pid=1, data=outcome.log,
        word_size=8 if target.word_size == 8 else 4, byte_order="big" if target.byte_order == "big" else "little",
    )  # fmt: skip
    return render(template, record, Place("case", "place"))


def context_of(case: Case, target: Target) -> FakeContext:
    """Return the simulated context that the section ``context`` of a case describes."""
    context = FakeContext(target.architecture)
    for line in case.lines("context", target) or ():
        _apply(context, line, target)
    return context


def _apply(context: FakeContext, line: ContextLine, target: Target) -> None:
    word, number = line.words[0], line.numbers[0] if line.numbers else 0
    match line.words:
        case ("reg" | "user", name):
            value = number if number >= 0 else number & context.architecture.word_mask
            context.set_value(name, value, user=word == "user")
        case ("mem" | "ro", address):
            context.map_memory(int(address, 0), encode_items(line.items, target, {}), read_only=word == "ro")
        case ("phys", address):
            context.map_physical_memory(int(address, 0), encode_items(line.items, target, {}))
        case ("frame", address):
            context.page_frames[int(address, 0)] = number
        case ("lv",):
            context.local_variables.extend(n & context.architecture.word_mask for n in line.numbers)
        case ("gv",):
            context.global_variables.extend(n & ((1 << 64) - 1) for n in line.numbers)
        case ("cv",):
            context.cpu_variables().extend(n & context.architecture.word_mask for n in line.numbers)
        case ("entry", name):
            is_long = name == "time" or "-" in name  # the names of most counters have hyphens, those of registers none
            mask = (1 << 64) - 1 if is_long else context.architecture.word_mask
            context.entry = {**(context.entry or {}), name: number & mask}
        case ("tv",):
            context.thread_variables().extend(n & context.architecture.word_mask for n in line.numbers)
        case ("port", port):
            context.ports[int(port, 0)] = number
        case ("segment", selector):
            base, *last = line.numbers
            context.segments[int(selector, 0)] = (base, last[0]) if last else base
        case ("symbol", name):
            context.symbols[name] = number
        case ("kstack",):
            context.frames_in_kernel.extend(line.numbers)
        case ("ustack",):
            context.frames_in_program.extend(line.numbers)
        case ("field", name):
            context.traced_fields[name] = number
        case ("usdt", *arguments):
            context.arguments = parse_arguments(" ".join(arguments), context.architecture)
        case ("cpuid", leaf):
            eax, ebx, ecx, edx = line.numbers
            context.cpuid[int(leaf, 0)] = (eax, ebx, ecx, edx)
        case ("msr", which):
            context.msr[int(which, 0)] = number
        case ("gdtr" | "idtr",):
            base, limit = line.numbers
            context.tables[word] = (base, limit)
        case ("failing", name):
            context.extensions[name] = Extension(interpret=_fail)
        case ("counter", name):
            context.counters[name] = number & (1 << 64) - 1
        case ("comm", name):
            context.comm = name
        case ("pid" | "tid" | "uid" | "cpu" | "task" | "time",):
            context.ids[word] = number
        case _:
            raise AssertionError(f"unknown context line '{' '.join(line.words)} ='")


def _fail(view: View) -> None:
    view.push(1)
    view.log(b"lost")
    raise RuntimeError("on purpose")


def _compare(
    case: Case,
    target: Target,
    image: CodeImage,
    context: FakeContext,
    outcome: Outcome,
    machine: Machine | FinalState,
) -> None:
    mask = context.architecture.word_mask
    offsets = {name: offset for offset, names in image.labels.items() for name in names} | image.procedures
    ending = outcome.ending.value + (f" {outcome.exit_code}" if outcome.exit_code else "")
    if outcome.ending is Ending.SKIP:
        ending += f" {outcome.value:#x}"
    if outcome.is_cut:
        ending += " cut"
    assert ending == (case.text("end", target) or "exit").strip()
    for section, data in (("log", outcome.log), ("trace", outcome.trace)):
        if (items := case.items(section, target)) is not None:
            assert data.hex(" ") == encode_items(items, target, offsets).hex(" "), section
    for section, value in (("major", outcome.major), ("minor", outcome.minor)):
        if (numbers := case.numbers(section, target)) is not None:
            assert [value] == numbers, section
    if (numbers := case.numbers("stack", target)) is not None:
        assert [machine.peek(n) for n in range(len(numbers))] == [n & mask for n in numbers], "stack"
    for section, values, width in (
        ("lv", context.local_variables, mask),
        ("gv", context.global_variables, (1 << 64) - 1),
        ("cv", context.cpu_variables(), mask),
        ("tv", context.thread_variables(), mask),
    ):
        if (numbers := case.numbers(section, target)) is not None:
            assert list(values) == [n & width for n in numbers], section
    if (text := case.text("tables", target)) is not None:
        shown = [line for store in context.keyed_tables for line in table_lines(store.contents())]
        assert "\n".join(shown).strip() == text.strip(), "tables"
    if (text := case.text("printed", target)) is not None:
        printed = _printed(case, target, outcome)
        assert printed == text, f"printed {printed!r}"
    if (text := case.text("rpn", target)) is not None:
        assert compile_c(case, target, Diagnostics()).source.strip() == text.strip(), "rpn"
    for line in case.lines("registers", target) or ():
        assert (line.words, context.value_of(line.words[0])) == (line.words, line.numbers[0] & mask)
    for line in case.lines("memory", target) or ():
        data = encode_items(line.items, target, {})
        assert context.read(int(line.words[0], 0), len(data)).hex(" ") == data.hex(" "), "memory"
    if (lines := case.lines("ports", target)) is not None:
        writes = [(int(line.words[0], 0), int(line.words[1]), line.numbers[0]) for line in lines]
        assert context.port_writes == writes
    if (names := case.text("extensions", target)) is not None:
        assert [name or "all" for name in context.extension_calls] == names.split()

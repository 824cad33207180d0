"""Extensions in their form for eBPF."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_instructions import Alu, Jump
from dprobes.diagnostics import Diagnostics
from dprobes.errors import NotSupportedError
from dprobes.extensions import Extension
from dprobes.rpn.compilation_passes import CompileOptions, check_program, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.instruction_set import ExceptionCode
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare
from dprobes.vm import Interpreter
from support.ebpf_abilities import loop_forms
from support.ebpf_backend import EbpfRunner, obstacle

if TYPE_CHECKING:
    from dprobes.bpf.lower import Composer
    from dprobes.extensions import View

SAMPLE = Path(__file__).parents[4] / "examples" / "fingerprint" / "dprobes_fingerprint.py"
WORDS = pytest.mark.parametrize("name", ["i386", "x86_64"])


@pytest.fixture(scope="module", autouse=True)
def can_run() -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)


def sample() -> Extension:
    spec = importlib.util.spec_from_file_location("dprobes_fingerprint", SAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    extension: Extension = module.fingerprint
    return extension


def check_both(name: str, text: str, extensions: dict[str, Extension]) -> bytes:
    """Run a handler in the interpreter and as eBPF with all forms of loops; return what both logged."""

    def world() -> FakeContext:
        registers = {"esi": 5} if name == "i386" else {"rsi": 5}
        return FakeContext(
            name, registers=registers, memory={0x1000: b"Hello, world" + bytes(4084)}, extensions=extensions
        )

    context = world()
    diagnostics = Diagnostics()
    options = CompileOptions()
    program = parse_source(SourceFile("handler.rpn", f"name = x; offset = 0; {text}"), diagnostics, options)
    check_program(program, context.architecture, diagnostics, options)
    image = encode(program, context.architecture)
    point = prepare(program, 0, context)
    expected = Interpreter(image, context.architecture).run(image.handlers[0], point, context)
    for loops in loop_forms():
        with EbpfRunner(image, context.architecture, world(), loops) as runner:
            assert runner.run(image.handlers[0], point)[0] == expected
    return expected.log


@WORDS
@pytest.mark.parametrize("length", [0, 1, 12, 4095, 4096])
def test_the_sample_does_the_same_in_both_forms(name: str, length: int) -> None:
    log = check_both(name, f"push {length}; push 0x1000; callk fingerprint; log 1", {"fingerprint": sample()})
    if length == 0:
        assert log[:4] == 0x811C9DC5.to_bytes(4, "little")


@WORDS
def test_an_extension_that_cannot_read_raises_invalid_addr_for_the_first_byte(name: str) -> None:
    log = check_both(name, "sx l; push 20; push 0x1ff8; callk fingerprint; exit; l: log 3", {"fingerprint": sample()})
    word = 4 if name == "i386" else 8
    assert log == b"".join(n.to_bytes(word, "little") for n in (1, 0x2000, 0))


@WORDS
def test_so_it_does_where_nothing_is_known_of_the_stack(name: str) -> None:
    """It faults in a loop; the cells below those of the exception are those that were there."""
    text = "sx l; push 7; push 8; save tsp; restore tsp; push 20; push 0x1ff8; callk fingerprint; exit; l: log 5"
    log = check_both(name, text, {"fingerprint": sample()})
    word = 4 if name == "i386" else 8
    assert log == b"".join(n.to_bytes(word, "little") for n in (1, 0x2000, 0, 8, 7))


def double(view: View) -> None:
    view.push(2 * view.pop())


def compile_double(code: Composer) -> None:
    value = code.pop()
    code.calculate(Alu.ADD, value, value)
    code.push(value)


def add_register(view: View) -> None:
    value = view.pop() + view.register("esi")
    if value > 100:
        value = 7
    view.push(value)


def compile_add_register(code: Composer) -> None:
    value = code.pop()
    code.calculate(Alu.ADD, value, code.register("esi"))
    with code.when(Jump.JGT, value, 100):
        code.set(value, 7)
    code.push(value)


BOTH = {
    "double": Extension(interpret=double, compile=compile_double),
    "add": Extension(interpret=add_register, compile=compile_add_register),
}


@WORDS
@pytest.mark.parametrize(
    "text",
    [
        "push 3; callk; log 1",
        "push 3; callk double; callk add; push 9; log 2",
        "push 300; callk add; log b, 1",
        "push -1; callk double; log 1",
        "push 3; l: callk double; dup 1; push 90; xchg; sub; ros 1; loop l; log 1",
        "push 1; callk double; save tsp; log 2",
    ],
)
def test_extensions_work_on_the_stack_wherever_they_are_called(name: str, text: str) -> None:
    check_both(name, text, BOTH)


def compile_throw(code: Composer) -> None:
    code.throw(ExceptionCode.USER_EX, code.pop(), 5)


def throw(view: View) -> None:
    from dprobes.extensions import Raised

    raise Raised(ExceptionCode.USER_EX, view.pop(), 5)


@WORDS
@pytest.mark.parametrize("mask", ["ex_mask = 0x8fff; ", ""])
def test_an_extension_may_raise_any_exception(name: str, mask: str) -> None:
    extensions = {"throw": Extension(interpret=throw, compile=compile_throw)}
    check_both(name, f"{mask}sx l; push 3; callk throw; push 1; log 1; exit; l: log 3", extensions)


def test_an_extension_without_a_form_for_ebpf_is_refused() -> None:
    with pytest.raises(NotSupportedError) as caught:
        check_both("x86_64", "push 3; callk double", {"double": Extension(interpret=double)})
    assert caught.value.message == "the extension 'double' has no form for eBPF"
    assert caught.value.hint == "use --engine ptrace"


def test_an_extension_that_pushes_in_a_loop_is_refused() -> None:
    def unbalanced(code: Composer) -> None:
        with code.loop():
            code.push(1)

    with pytest.raises(NotSupportedError) as caught:
        check_both("x86_64", "callk pushes", {"pushes": Extension(interpret=lambda view: None, compile=unbalanced)})
    assert caught.value.message == "an extension pushes or pops within a loop or under a condition"


def test_an_extension_with_too_many_variables_is_refused() -> None:
    def greedy(code: Composer) -> None:
        for _ in range(17):
            code.variable()

    with pytest.raises(NotSupportedError, match="more than 16 variables"):
        check_both("x86_64", "callk greedy", {"greedy": Extension(interpret=lambda view: None, compile=greedy)})

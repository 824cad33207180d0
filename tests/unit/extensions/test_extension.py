"""What extensions see and change, and how what they raise reaches the handler; in a world made of dictionaries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dprobes.extensions import AddressFault, ExceptionCode, Extension, Raised, View
from dprobes.testing import FakeContext, run_handler

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.vm import Outcome

UNDECLARED = "PermissionError: the extension writes to the target, but is not declared with writes=True"


def call(
    function: Callable[[View], object],
    context: FakeContext | None = None,
    *,
    handler: str = "callk it",
    writes: bool = False,
    **header: Any,
) -> tuple[Outcome, FakeContext]:
    """Run a handler that calls ``function`` as an extension."""
    context = context or FakeContext()

    def interpret(view: View) -> None:
        function(view)

    context.extensions["it"] = Extension(interpret=interpret, writes=writes)
    return run_handler(handler, context, **header), context


def seen(function: Callable[[View], object], context: FakeContext | None = None, **header: Any) -> object:
    """Return what ``function`` returns of the view that it gets."""
    found: list[object] = []
    _, context = call(lambda view: found.append(function(view)), context, **header)
    assert context.warnings == []
    return found[0]


def failure(function: Callable[[View], object], context: FakeContext | None = None) -> str:
    """Return what is said of an extension that fails, without the place."""
    outcome, context = call(function, context, handler="sx failed; callk it; exit; failed: log 2")
    assert outcome.log == (0x40).to_bytes(8, "little") + (6).to_bytes(8, "little")
    (warning,) = context.warnings
    return warning.partition(" (/")[0]


def test_cells_are_taken_modulo_the_word() -> None:
    for architecture, size in (("x86_64", 8), ("i386", 4)):
        context = FakeContext(architecture)
        outcome, _ = call(lambda view: view.push(view.pop() - 2), context, handler="push 1; callk it; log 1")
        assert outcome.log == b"\xff" * size
    outcome, _ = call(lambda view: view.push(view.peek(1)), handler="push 7; push 8; callk it; log b, 3")
    assert outcome.log == bytes([7, 8, 7])


def test_the_program_and_the_hit() -> None:
    context = FakeContext("i386", pid=1, tid=2, uid=3, cpu=4, time=5)
    assert seen(lambda v: (v.pid, v.tid, v.uid, v.cpu, v.time), context) == (1, 2, 3, 4, 5)
    assert seen(lambda v: (v.architecture, v.word_size, v.byte_order), context) == ("i386", 4, "little")
    assert seen(lambda v: (v.module, v.offset, v.major, v.minor), minor=9, offset=0x20) == ("handler", 0x20, 0, 9)


def test_codes_of_the_record_may_be_set() -> None:
    def change(view: View) -> None:
        view.major, view.minor = 0x10005, 6

    outcome, _ = call(change)
    assert (outcome.major, outcome.minor) == (5, 6)


def test_registers_by_name_as_handlers_see_them() -> None:
    context = FakeContext(registers={"rdi": 5, "rsp": 0x1000}, user_registers={"rdi": 6, "xmm0": 1 << 100})
    assert seen(lambda v: (v.register("arg0"), v.register("RDI", user=True)), context) == (5, 6)
    assert seen(lambda v: v.register("xmm0", user=True), context) == 1 << 100
    i386 = FakeContext("i386", registers={"esp": 0x1000}, memory={0x1000: bytes(4) + b"\1\2\0\0" + b"\3\0\0\0"})
    assert seen(lambda v: (v.register("arg0"), v.register("arg1")), i386) == (0x201, 3)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda v: v.register("rix"), "ValueError: x86_64 has no register 'rix'"),
        (lambda v: v.register("xmm0"), "ValueError: 'push r' is not allowed for register 'xmm0' of an extension"),
        (lambda v: v.register("cpuid"), "ValueError: 'push r' is not allowed for register 'cpuid' of an extension"),
        (lambda v: v.set_register("rip", 1), "ValueError: 'pop r' is not allowed for register 'rip' of an extension"),
        (lambda v: v.read(0, 1 << 16), "ValueError: 65536 bytes cannot be read at once, but 0 to 65535"),
        (lambda v: v.local_variables[5], "IndexError: list index out of range"),
        (
            lambda v: v.log_memory(bytes(1 << 16)),
            "ValueError: an item of 65536 bytes cannot be logged, but at most 65535",
        ),
        (lambda v: v.set_register("rax", 1), UNDECLARED),
        (lambda v: v.write(0, b"x"), UNDECLARED),
    ],
)
def test_wrong_uses_are_failures(use: Callable[[View], object], message: str) -> None:
    assert failure(use) == f"the extension 'it' failed: {message}"


def test_a_writing_extension_changes_registers_and_memory() -> None:
    def change(view: View) -> None:
        view.set_register("arg0", -1)
        view.write(0x1001, b"xyz")

    _, context = call(change, FakeContext(memory={0x1000: b"abcde"}), writes=True)
    assert context.value_of("rdi") == (1 << 64) - 1
    assert context.read(0x1000, 5) == b"axyze"


def test_too_much_to_write_is_a_failure() -> None:
    _, context = call(lambda v: v.write(0x1000, bytes(4097)), FakeContext(memory={0x1000: b""}), writes=True)
    assert "ValueError: 4097 bytes cannot be written at once, but at most 4096" in context.warnings[0]


def test_memory_that_is_not_there_is_an_exception_of_the_handler_unless_it_is_caught() -> None:
    handler = "sx fault; callk it; exit; fault: log b, 2"
    context = FakeContext(memory={0x1000: b"ab\0c"})
    outcome, _ = call(lambda view: view.read(0x1FFE, 4), context, handler=handler + "; log 1")
    assert outcome.log[:2] == bytes([1, 0])

    def careful(view: View) -> None:
        try:
            view.read_string(0x5000)
        except AddressFault as fault:
            view.log(hex(fault.address).encode())
        view.log(view.read_string(0x1000) + view.read_string(0x1000, 1) + view.read(0, 0))

    assert call(careful, context)[0].log == b"0x5000" + b"ab" + b"a"


def test_variables_are_masked_and_the_upper_half_of_global_ones_is_kept() -> None:
    context = FakeContext("i386", local_variables=[1, 2], global_variables=[0x1_0000_0002], cpu_variables=[3])

    def change(view: View) -> None:
        view.local_variables[1] = -1
        view.global_variables[0] += 5
        view.cpu_variables[0] = len(view.local_variables)

    call(change, context)
    assert (context.local_variables, context.global_variables) == ([1, 0xFFFFFFFF], [0x1_0000_0007])
    assert context.cpu_variables() == [2]


def test_items_are_logged_as_by_instructions_whole_or_not_at_all() -> None:
    def log(view: View) -> None:
        view.log_string(b"text")
        view.log_memory(b"\1")
        view.log(bytes([view.log_room]))
        view.log(bytes(view.log_room + 1))

    outcome, _ = call(log, handler="sx full; callk it; exit; full: log b, 2", ex_mask=0x1FFF, logmax=20)
    # 9 bytes are free behind the two items; then the exception's code and first parameter.
    assert outcome.log == b"\1\4\0text" + b"\0\1\0\1" + bytes([9]) + bytes([0x1000 & 0xFF, 20])


def test_an_exception_on_purpose_obeys_the_mask() -> None:
    def complain(_: View) -> None:
        raise Raised(ExceptionCode.USER_EX, 1, 2)

    handler = "sx caught; callk it; log b, 1; exit; caught: log 3"
    # By default it is ignored, and the handler goes on.
    assert call(complain, handler="push 9; " + handler)[0].log == b"\x09"
    assert len(call(complain, handler=handler, ex_mask=0x8FFF)[0].log) == 24

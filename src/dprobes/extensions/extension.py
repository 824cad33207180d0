"""Extensions: their definition, and how one is called."""

from __future__ import annotations

from dataclasses import dataclass  # noqa: TID251 - it has what is rare
from typing import TYPE_CHECKING

from dprobes.extensions.view import View
from dprobes.rpn.isa import ExceptionCode
from dprobes.vm.context import AddressFault, SelectorFault
from dprobes.vm.machine import Raised

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.bpf.lower.composer import Composer
    from dprobes.vm.machine import Machine

__all__ = ["ENTRY_POINTS", "FAILED", "Extension", "call_extensions"]

ENTRY_POINTS = "dprobes.extensions"
"""The group of entry points that packages register extensions in."""

FAILED = 6
"""Parameter 1 of the INVALID_OPERAND that an extension raises which fails; parameter 2 is its number, from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """
    Describe an extension by the forms that it has.

    ``interpret`` is the one for engines that interpret handlers, ``compile`` that for engines that compile them to
    eBPF: it is called once for each place that calls the extension, and writes what is to be done there.
    ``writes`` says that it changes registers or memory of the target; a program that calls it then needs
    ``--allow-write``, and without it the view refuses.
    """

    interpret: Callable[[View], None]
    compile: Callable[[Composer], None] | None = None
    writes: bool = False


def call_extensions(
    extensions: Mapping[str, Extension],
    name: str | None,
    machine: Machine,
    warn: Callable[[str], None],
) -> None:
    """
    Call the extension called ``name``, or all of them in order.

    One that fails with a Python exception is reported to ``warn``, leaves the stack and the log as they were, and
    raises INVALID_OPERAND; those behind it are not called then.
    """
    for number, (known, extension) in enumerate(extensions.items()):
        if name is not None and name != known:
            continue
        before = machine.tsp, machine.lp, machine.plp
        try:
            extension.interpret(View(machine, may_write=extension.writes))
        except (Raised, AddressFault, SelectorFault):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, the target must go on; even a SystemExit
            machine.tsp, machine.lp, machine.plp = before
            warn(f"the extension '{known}' failed: {_description(error)}")
            raise Raised(ExceptionCode.INVALID_OPERAND, FAILED, number) from None


def _description(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    text = str(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"

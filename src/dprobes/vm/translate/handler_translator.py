"""
The translator of handlers to Python functions.

A handler is translated when it first runs. The results of ``Translator`` and ``Interpreter`` are equal, except for the
value of a popped cell, which is unspecified.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from dprobes.rpn.instruction_set import RPN_STACK_CELLS, Token
from dprobes.vm.interpreter import Interpreter
from dprobes.vm.rpn_machine import Ending, Frame, Machine, Outcome, Point, Raised, read_string
from dprobes.vm.stack_rules import add_to_variable, store_variable
from dprobes.vm.translate.function_writer import Function, Writer
from dprobes.vm.translate.instruction_templates import write_instruction
from dprobes.vm.world_context import AddressFault, SelectorFault
from dprobes.vm.world_rules import argument_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dprobes.arch import Architecture
    from dprobes.arch.usdt_arguments import Argument
    from dprobes.rpn.instruction_encoding import CodeImage
    from dprobes.vm.interpreter import Step
    from dprobes.vm.world_context import Context

__all__ = ["Translator"]

if TYPE_CHECKING:
    Handler = Callable[[Point, Context], Any]


class Translator:
    """
    Translator and runner of the handlers of one probe program, with the interface of ``Interpreter``.

    Each thread that runs handlers needs its own translator.
    """

    def __init__(self, image: CodeImage, architecture: Architecture) -> None:
        self._image = image
        self._architecture = architecture
        self._interpreter = Interpreter(image, architecture)
        self._support = _support(architecture)
        self._handlers: dict[int, Handler] = {}
        self._machines: dict[int, Handler] = {}

    def run(self, start: int, point: Point, context: Context) -> Outcome:
        """Run the handler whose code starts at byte ``start`` of the image, and return its outcome."""
        outcome: Outcome = self.handler(start)(point, context)
        return outcome

    def handler(self, start: int) -> Handler:
        """
        Return the function that runs the handler whose code starts at byte ``start``.

        Its arguments are a point and a context, its result the outcome.
        """
        handler = self._handlers.get(start)
        if handler is None:
            handler = self._handlers[start] = self._compile(start, ends=True)
        return handler

    def final_state(self, start: int, point: Point, context: Context) -> Machine:
        """Run a handler as ``run`` does, and return the machine afterwards, which takes longer than ``run``."""
        handler = self._machines.get(start)
        if handler is None:
            handler = self._machines[start] = self._compile(start, ends=False)
        machine: Machine = handler(point, context)
        return machine

    def function(self, start: int, *, ends: bool = True) -> Function:
        """
        Return the function of the handler at byte ``start``, not yet compiled.

        Without ``ends``, the interpreter executes the instructions that end the handler.
        """
        return Writer(
            self._image, self._architecture, self._interpreter.steps, start, write_instruction, ends=ends
        ).function()

    def _compile(self, start: int, *, ends: bool) -> Handler:
        function = self.function(start, ends=ends)

        def leave(number: int, point: Point, context: Context, variables: Mapping[str, Any]) -> Outcome | Machine:
            machine = self._interpreter.finish(self._machine(function, number, point, context, variables))
            return machine.outcome() if ends else machine

        names: dict[str, Any] = {**self._support, **function.names, "leave": leave}
        exec(compile(function.source, f"<handler at {start}>", "exec"), names)  # noqa: S102 - the text is ours
        handler: Handler = names["handler"]
        return handler

    def _machine(
        self, function: Function, number: int, point: Point, context: Context, variables: Mapping[str, Any]
    ) -> Machine:
        """Return a machine in the state of exit ``number`` of a function with the local variables ``variables``."""
        state = function.exits[number]
        machine = self._interpreter.machine(state.ip, point, context)
        machine.tsp, machine.sbp = state.tsp, state.sbp
        machine.frames = [Frame(*call) for call in state.calls]
        for cell, atom in (*state.popped.items(), *state.cells.items()):
            machine.cells[cell] = variables[atom] if isinstance(atom, str) else int(atom)
        machine.jumps, machine.major, machine.minor = variables["jumps"], variables["major"], variables["minor"]
        machine.elapsed = variables.get("elapsed")
        machine.append(variables["log"])
        machine.plp = machine.lp  # all log instructions so far have succeeded
        return machine


def _support(architecture: Architecture) -> dict[str, object]:
    """Return the global names of the functions of handlers for a processor, with the objects that they name."""
    mask, word_size = architecture.word_mask, architecture.word_size
    prefix = struct.Struct((">" if architecture.byte_order == "big" else "<") + "BH")
    machine = Machine(architecture, Point(), None, 0)  # type: ignore[arg-type]

    def apply(step: Step, context: Context, *cells: int) -> list[int]:
        """Apply a rule that uses only stack and context; arguments ``cells`` and result have the top first."""
        rule, operand, _ = step
        machine.context = context
        machine.tsp = RPN_STACK_CELLS - len(cells)
        machine.cells[machine.tsp :] = cells
        rule(machine, operand)
        return machine.cells[machine.tsp :]

    def argument(arguments: Sequence[Argument], number: int, context: Context) -> int:
        return argument_value(arguments, number, context, architecture)

    # These functions return None for an item that does not fit, or cannot be read whole.

    def string_item(context: Context, address: int, maximum: int, room: int) -> bytes | None:
        room -= prefix.size
        if room < 0:
            return None
        try:
            data = read_string(context, address, min(maximum, room + 1), mask).removesuffix(b"\0")
        except AddressFault:
            return None
        return prefix.pack(Token.STRING, len(data)) + data if len(data) <= room else None

    def memory_item(context: Context, address: int, length: int, room: int) -> bytes | None:
        if length + prefix.size > room:
            return None
        try:
            data = context.read(address, length) if length else b""
        except AddressFault:
            return None
        return prefix.pack(Token.MEMORY, length) + data

    def variables_item(token: int, values: Sequence[int], start: int, count: int, room: int) -> bytes | None:
        if count > max(0, len(values) - start) or prefix.size + count * word_size > room:
            return None
        return prefix.pack(token, count) + machine.words([values[start + n] for n in range(count)])

    def stack_item(token: int, stack_of: Callable[[int], Sequence[int]], frames: int, room: int) -> bytes | None:
        if room < prefix.size:
            return None
        frames = min(frames, (room - prefix.size) // word_size)
        kept = list(stack_of(frames)[:frames])
        return prefix.pack(token, len(kept)) + machine.words(kept)

    return {
        "apply": apply,
        "argument": argument,
        "string_item": string_item,
        "memory_item": memory_item,
        "variables_item": variables_item,
        "stack_item": stack_item,
        "store_variable": store_variable,
        "add_to_variable": add_to_variable,
        "new": tuple.__new__,
        "Outcome": Outcome,
        "FAULTS": (Raised, AddressFault, SelectorFault),
        **{ending.name: ending for ending in Ending},
    }

"""What the kernel's verifier says about a handler, by the place in its source that it is about."""

from __future__ import annotations

import os
import re
import tempfile
from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.engines.linux.bpfcalls import LogLevel, verifier_log
from dprobes.errors import DprobesError, EngineError, InternalError
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.lower.request import Lowered
    from dprobes.engines.linux import bpfcalls
    from dprobes.rpn.program import Program
    from dprobes.source import Span

__all__ = ["rejection", "source_place", "span_in"]

_NARROW = 4

_INSTRUCTION = lazy_pattern(r"^(\d+): \(", re.MULTILINE)
_TOO_LARGE = lazy_pattern(r"^BPF program is too large\. Processed (\d+) insn", re.MULTILINE)


def span_in(program: Program, word_size: int, offset: int) -> Span | None:
    """Return where the instruction at a byte of the encoded program was written."""
    from dprobes.rpn.encoder import encode

    return encode(program, architecture("i386" if word_size == _NARROW else "x86_64")).span_of(offset)


def source_place(log: str, lowered: Lowered, span_of: Callable[[int], Span | None]) -> Span | None:
    """
    Return where in the source of a handler the verifier stopped; None if it did not say.

    ``span_of`` knows the place of the instruction at a byte of the encoded program.
    """
    numbers = _INSTRUCTION.findall(log)
    origins = lowered.assembled.origins
    if not numbers or int(numbers[-1]) >= len(origins):
        return None
    # What belongs to no instruction was written for the one before it.
    before = [origin for origin in origins[: int(numbers[-1]) + 1] if origin >= 0]
    return span_of(before[-1]) if before else None


def rejection(
    program: bpfcalls.Program, lowered: Lowered, name: str, error: OSError, span_of: Callable[[int], Span | None]
) -> DprobesError:
    """Return the error that the kernel does not take the handler called ``name``, with what its verifier says."""
    log = verifier_log(program, LogLevel.LEVEL1 | LogLevel.STATS)
    span = source_place(log, lowered, span_of)
    where = f" at {span.file.name}:{span.line}" if span is not None else ""
    if (found := _TOO_LARGE.search(log)) is not None:
        return EngineError(
            f"the handler of {name} is too much for the kernel's verifier, which gave up after {int(found[1]) - 1} "
            f"instructions{where}",
            hint="use --engine ptrace, or make several handlers of it",
        )
    descriptor, path = tempfile.mkstemp(prefix="dprobes-verifier-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"the handler of {name}: {error}\n\n{log}\neBPF instruction: offset in the encoded program\n")
        file.writelines(f"{n}: {origin:#x}\n" for n, origin in enumerate(lowered.assembled.origins) if origin >= 0)
        file.write(program.instructions.hex(" ", 8) + "\n")
    return InternalError(f"the kernel refuses the handler of {name}{where}; what it says is in '{path}'")

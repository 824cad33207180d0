"""
The code of handlers, which may be known from an earlier run.

In code that is kept, our own process is another one each time: the places of its id are found by lowering for two that
no process has, which leaves everything else as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.resolve.knownanswers import answered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.bpf.lower.request import Lowered, Request
    from dprobes.resolve.probepoints import ResolvedCode
    from dprobes.rpn.point import Point

__all__ = ["lowered_handler"]

_NOBODY = (0x7FFF_FFF1, 0x7FFF_FFF2)
"""No ids of processes: these are below PID_MAX_LIMIT (1 << 22)."""


def lowered_handler(resolved: ResolvedCode, number: int, point: Point, request: Request) -> Lowered:
    """Return the code of the handler of a definition; raise ``NotSupportedError`` as ``lower`` does."""
    own = request.filter.excluded
    if resolved.answers is None or own is None:
        return answered(
            resolved.answers, ("handler", number, point, request), lambda: _lower(resolved, number, point, request)
        )
    first, second = (replace(request, filter=replace(request.filter, excluded=each)) for each in _NOBODY)

    def work() -> tuple[Lowered, tuple[int, ...]]:
        one, other = (_lower(resolved, number, point, each) for each in (first, second))
        pairs = zip(one.assembled.code, other.assembled.code, strict=True)
        return one, tuple(index for index, (a, b) in enumerate(pairs) if a != b)

    return _for_process(own, *answered(resolved.answers, ("handler for us", number, point, first), work))


def _for_process(own: int, lowered: Lowered, places: Iterable[int]) -> Lowered:
    """Return code for nobody as that for a process."""
    code = list(lowered.assembled.code)
    for index in places:
        code[index] = code[index]._replace(imm=own)
    return replace(lowered, assembled=replace(lowered.assembled, code=tuple(code)))


def _lower(resolved: ResolvedCode, number: int, point: Point, request: Request) -> Lowered:
    from dprobes.bpf.lower import lower

    return lower(resolved.image, resolved.architecture, resolved.image.handlers[number], point, request)

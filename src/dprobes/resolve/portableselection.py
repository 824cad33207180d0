"""A part of a compiled program: some of its definitions, with what is carried for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.resolve.portable import needs_write

if TYPE_CHECKING:
    from dprobes.ppdf.model import Ppdf
    from dprobes.rpn.program import Program

__all__ = ["selected"]


def selected(ppdf: Ppdf, program: Program, chosen: Program) -> Ppdf:
    """Return the file of a part of its program."""
    kept = [n for n, each in enumerate(program.definitions) if any(each is other for other in chosen.definitions)]
    numbers = {old: new for new, old in enumerate(kept)}
    builds = tuple(
        replace(
            build,
            places=tuple(
                replace(place, definition=numbers[place.definition])
                for place in build.places
                if place.definition in numbers
            ),
        )
        for build in ppdf.builds
    )
    kernels = tuple(
        replace(
            kernel,
            places=tuple(
                place._replace(definition=numbers[place.definition])
                for place in kernel.places
                if place.definition in numbers
            ),
        )
        for kernel in ppdf.kernels
    )
    return replace(ppdf, program=chosen, builds=builds, kernels=kernels, needs_write=needs_write(chosen), ebpf=())

"""Measure what types and variables from debug information cost when a program is compiled."""

from __future__ import annotations

import os
import resource
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from table import Measurement
from tracing import DPROBES, byte_code

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["debug_information"]

ROUNDS = 5


class Case(NamedTuple):
    """A one-liner with a chain of three fields, and the same with declarations of its own."""

    what: str
    with_types: str
    declared: str


CASES = (
    Case(
        "libc, libc6-dbg",
        'libc.so.6:fclose(stream) { printf("%d", stream->_chain->_chain->_fileno); }',
        "struct f { char p[104]; struct f *chain; int number; };"
        ' libc.so.6:fclose(struct f *f) { printf("%d", f->chain->chain->number); }',
    ),
    Case(
        "python3.11, python3.11-dbg",
        '/usr/bin/python3.11:PyObject_Call { printf("%s", str(callable->ob_type->tp_name)); }',
        "struct t { char p[24]; char *name; }; struct o { long count; struct t *type; };"
        ' /usr/bin/python3.11:PyObject_Call(struct o *o) { printf("%s", str(o->type->name)); }',
    ),
)


def debug_information(directory: Path) -> list[Measurement]:
    """Return a row for each module: a whole process that compiles the program, and the same without types."""
    return [row for case in CASES for row in _rows(case, directory)]


def processor_time() -> float:
    """Return the seconds of processor time that all children have taken which have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _rows(case: Case, directory: Path) -> list[Measurement]:
    best: dict[str, float] = {}
    for name, text in (("types", case.with_types), ("declared", case.declared)):
        source = directory / f"{name}.dpc"
        source.write_text(text)
        command = [*DPROBES, "build", "--emit", "rpn", str(source)]
        for _ in range(ROUNDS):
            begin = processor_time()
            done = subprocess.run(
                command,
                capture_output=True,
                env=os.environ | byte_code(directory, is_there=True),
                check=False,
                timeout=60,
            )
            if done.returncode:
                return [Measurement(f"compile with types: {case.what} is not installed", None)]
            taken = (processor_time() - begin) * 1e6
            best[name] = min(best.get(name, taken), taken)
    return [
        Measurement(
            f"compile with types, processor time: {case.what}", best["types"], "types declared", best["declared"]
        )
    ]

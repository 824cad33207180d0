"""What to say where probepoints were inserted and never reached: what did run, and what was probably meant."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.resolve.probepoints import Probepoint

__all__ = ["advice_on_unreached"]

_NAMED = 3
"""How many names an advice has at most."""


def advice_on_unreached(probes: Sequence[Probepoint], command: Sequence[str]) -> str | None:
    """Return what a command executes, if that is not what was probed; None if nothing is known that would help."""
    paths = list(dict.fromkeys(probe.path for probe in probes if probe.is_in_code))
    if not paths or not command:
        return None
    from dprobes.target.executables import executable_of

    try:
        program = executable_of(command[0])
    except TargetError:
        return None
    if any(_is_same(path, program) for path in paths):
        return None
    started = shutil.which(command[0]) or command[0]
    script = "" if _is_same(started, program) else f" for the script '{started}'"
    executes = f"the command executes '{program}'{script}"
    if not any(".so" in os.path.basename(path) for path in paths):  # noqa: PTH119 - text
        return f"{executes}, and the probepoints are in {_quoted(paths)}; what else it starts is probed as well"
    from dprobes.target.linkedfiles import linked_files

    linked = linked_files(program)
    if any(_is_same(path, other) for path in paths for other in linked.values() if other is not None):
        return None
    names = {Path(path).name for path in paths}
    others = [str(other) for name, other in linked.items() if name in names and other is not None]
    if others:
        return f"{executes}, which is linked with {_quoted(others)}"
    return f"{executes}, which is not linked with {_quoted(paths)}"


def _quoted(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(f"'{path}'" for path in paths[:_NAMED]) + more


def _is_same(path: str | os.PathLike[str], other: Path) -> bool:
    with contextlib.suppress(OSError):
        return Path(path).samefile(other)
    return False

"""
What is about to be written into a process, told to those who take it out: the restorer, and the process's own list.

A killed tracer leaves it to the restorer; where both were killed, the list says what to look for (``leftmanifest``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.ptrace.leftmanifest import entry_of
from dprobes.engines.ptrace.reports import Warned
from dprobes.engines.ptrace.restorerwire import JumpsPlanned
from dprobes.engines.ptrace.tracer.native.nativememory import list_in_manifest

if TYPE_CHECKING:
    from dprobes.engines.ptrace.sitepatch import SitePatch
    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.connection import Connection

__all__ = ["announce"]


def announce(
    connection: Connection,
    space: AddressSpace,
    number: int,
    pages: tuple[tuple[int, int], ...] = (),
    patches: tuple[SitePatch, ...] = (),
) -> str | None:
    """
    Tell the restorer what is about to be written for a program, and list it in the process.

    Return why that cannot be; then it must not be written.
    """
    memory = space.patches.memories[number]
    for pid in space.pids:
        connection.tell_restorer(JumpsPlanned(pid, memory, pages, patches))
    listed = space.patches.listed.setdefault(memory.page, set())
    # What could not be written at once comes again.
    new = {key: patch for patch in patches if (key := (patch.writes, patch.originals)) not in listed}
    if pages or new or not listed:
        why = list_in_manifest(space, memory, entry_of(memory, pages, tuple(new.values()), ()))
        if why is not None:
            return why
        listed.update(new)
    _list_breakpoints(connection, space, number, listed)
    return None


def _list_breakpoints(connection: Connection, space: AddressSpace, number: int, listed: set[object]) -> None:
    """List the breakpoints beside jumps, which are the tracer's and the restorer's to take out, as well."""
    memory = space.patches.memories[number]
    found = {(each.address, each.original) for each in space.breakpoints.values()}
    new = sorted(found - listed)
    if not new or memory.page in space.patches.unlisted:
        return
    why = list_in_manifest(space, memory, entry_of(memory, (), (), new))
    if why is None:
        listed.update(new)
        return
    space.patches.unlisted.add(memory.page)
    are = "breakpoint is" if len(new) == 1 else "breakpoints are"
    text = f"{len(new)} {are} not listed in process {min(space.pids, default=0)}: {why}"
    hint = "they stay there if all processes of dprobes are killed at once, and 'dprobes stop --left' misses them"
    connection.send(Warned(text, hint, number))

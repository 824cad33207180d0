"""
Whether uretprobes are safe for what is going to be probed; where not, breakpoints at the return instructions are.

What can be known of a file is in ``target.returnsafety``; here are the processes that execute it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.attach.mappers import FileId, find_mappers
from dprobes.engines.ebpf.attach.trampoline import Trampoline, trampoline
from dprobes.engines.linux.procfs import process_field
from dprobes.errors import DprobesError, TargetError
from dprobes.target.code.returnsafety import stack_user
from dprobes.target.elf.contents import file_contents
from dprobes.target.executables import executable_of
from dprobes.target.outline import return_address_user_in
from dprobes.target.ownership import foreign_owner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.ebpf.attach.mappers import Mapper
    from dprobes.target.location import Module

__all__ = ["process_hazard", "uretprobe_hazard"]


def uretprobe_hazard(
    module: Module, pids: Iterable[int] | None = None, command: str = "", reached: str = ""
) -> str | None:
    """
    Return why uretprobes in a module are not safe, as a clause; None if nothing is known against them.

    They change return addresses in every process that executes the module, whatever the scope of the run is. ``pids``
    restricts the look at these, for a link that is restricted. ``command`` is a program that is going to be started. Of
    other processes that start later, or confine themselves later, nobody can know. ``reached`` leads to the file where
    the module's path may not any more; ``TargetError`` if that does not.
    """
    if (reason := return_address_user_in(module)) is not None:
        return reason
    if command and (reason := _command_hazard(command)) is not None:
        return f"'{command}' {reason}"
    programs = _Programs()
    kind: Trampoline | None = None
    try:
        mappers = find_mappers(reached or module.path, pids)
    except OSError as error:
        raise TargetError(f"'{module.path}' is not there any more") from error
    for mapper in mappers.found:
        if kind is None and process_field(mapper.thread, "Seccomp") not in ("", "0"):
            kind = trampoline()
        if (reason := process_hazard(mapper.thread, kind) or programs.hazard(mapper)) is not None:
            return f"process {mapper.pid} ({process_field(mapper.thread, 'Name')}) {reason}"
    return None


def process_hazard(thread: int, kind: Trampoline | None) -> str | None:
    """Return why uretprobes are not safe for a process, as a predicate; ``kind`` is None if nobody has asked for it."""
    if process_field(thread, "Seccomp") not in ("", "0") and kind in (None, Trampoline.FILTERED_CALL):
        return "is confined by seccomp, which may refuse the system call of this kernel's uretprobes"
    if "shstk" in process_field(thread, "x86_Thread_features").split():
        return "has a shadow stack, on which not every kernel changes the return address as well"
    return None


def _command_hazard(command: str) -> str | None:
    try:
        return stack_user(file_contents(executable_of(command), "a program"))
    except DprobesError:
        return None  # it cannot be started: whoever starts it will say why


_RUNTIMES = ("/libstdc++.so", "/libc++abi.so")


_FOREIGN_SIZE = 256 << 20
"""Bytes of programs of other users that are searched, which takes about a second."""


class _Programs:
    """Look at the programs and libraries of processes, at each file once."""

    def __init__(self) -> None:
        self._known: dict[FileId, str | None] = {}
        self._left = _FOREIGN_SIZE

    def hazard(self, mapper: Mapper) -> str | None:
        """Return why the program or a library of a process may unwind or switch stacks, as a predicate."""
        program = f"/proc/{mapper.thread}/exe"
        try:
            status = os.stat(program)
            identity = FileId(status.st_dev, status.st_ino)
            if identity not in self._known:
                self._known[identity] = self._clause(program, status)
        except (OSError, TargetError):
            return None  # it has ended
        if (clause := self._known[identity]) is not None:
            return clause
        if any(library in mapper.text for library in _RUNTIMES):
            return "uses C++ exceptions, and what meets a uretprobe on its way up the stack ends the program"
        return None

    def _clause(self, program: str, status: os.stat_result) -> str | None:
        if (owner := foreign_owner(status)) is not None:
            self._left -= status.st_size
            if self._left < 0:
                return f"executes a program of {owner}, which is too long to be searched for what unwinds stacks"
        return stack_user(file_contents(Path(program), "a program"))

"""
One live patch in all processes that map a file: in those that map it now, and in those that map it later.

A process is known by its id, its start time and its first stack, which an exec changes. A process whose first stack
may not be read, such as one that is no longer dumpable, is taken for the same program. A child of fork(2) has a copy
of its parent's patch: it is not patched again, and its copy is removed with the others. New processes are found by
looking at all processes again, so calls before that execute the original function.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.foreign_users import ForeignUsers
from dprobes.engines.ptrace.patching.live_patches import insert_patch, plan_patch, remove_patch
from dprobes.engines.ptrace.patching.patch_records import is_active, patches_of
from dprobes.engines.ptrace.patching.patch_symbols import FileLimitError, ForeignFiles
from dprobes.engines.refusals import is_dprobes
from dprobes.errors import DprobesError, EngineError, TargetError, reason_of
from dprobes.platform.linux.procfs import first_stack_of, start_time, thread_state
from dprobes.target.module_lookup import find_module, suggestion
from dprobes.target.process_maps import code_mappings, command_name, mapping_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dprobes.engines.engine_interface import Notice
    from dprobes.engines.ptrace.patching.live_patches import Inserted, PlannedPatch
    from dprobes.engines.ptrace.patching.patch_records import PatchRecord

__all__ = ["PatchedProcesses", "ProcessResult"]

_Identity = tuple[int, int, int | None]
_ENDED = ("Z", "X")


class ProcessResult(NamedTuple):
    """
    The result for one process: a patch that was ``inserted``, that it has inherited from its parent, or an ``error``.

    ``name`` is the command name of the process.
    """

    pid: int
    name: str
    planned: PlannedPatch | None = None
    inserted: Inserted | None = None
    error: DprobesError | None = None

    @property
    def is_inherited(self) -> bool:
        """True if the process has a copy of its parent's patch."""
        return self.inserted is None and self.error is None


class PatchedProcesses:
    """
    The processes in which the function ``name`` of a module is replaced by ``symbol`` of the object at ``path``.

    ``module`` names the file; ``build_id``, ``replaces`` and ``idle`` are as for ``plan_patch`` and ``insert_patch``.
    Raise ``TargetError`` if this machine has no such file.
    """

    def __init__(
        self,
        path: Path,
        symbol: str,
        module: str,
        name: str,
        build_id: str | None,
        *,
        replaces: bool,
        idle: float | None,
    ) -> None:
        found = find_module(module)
        if found is None:
            raise TargetError(f"there is no module '{module}' on this machine", hint=suggestion(module))
        self.module = found
        """The path of the module's file."""
        self._path = path
        self._symbol = symbol
        self._name = name
        self._build_id = build_id
        self._replaces = replaces
        self._idle = idle
        self._file = _file_in_maps(found)
        self._examined: set[_Identity] = set()
        self._records: dict[_Identity, PatchRecord] = {}
        self._users = ForeignUsers(str(found))
        self._foreign = ForeignFiles(self._users)
        self._refused: set[_Identity] = set()
        self.closed = 0
        """Number of processes whose mappings this user may not read, at the last look."""
        self.is_skipping = False
        """True if there were notices about users whose processes were not all looked at."""
        self._read: set[int] = set()
        """The ids of the processes whose mappings were read at the last look."""

    def look(self) -> Iterator[ProcessResult]:
        """Patch the processes that map the file and have not been examined before; yield the result of each."""
        present: set[_Identity] = set()
        # The list is complete before a process is patched: the users' time is only for reading their mappings.
        for pid in list(self._mapping()):
            identity = self._identity_of(pid)
            if identity is None:
                continue
            present.add(identity)
            if identity not in self._examined:
                self._examined.add(identity)
                result = self._patched(pid, identity)
                if isinstance(result.error, FileLimitError):  # it is tried again later
                    self._examined.discard(identity)
                    if identity in self._refused:
                        continue
                    self._refused.add(identity)
                yield result
        # A process that has ended, or has executed another program, has no patch any more.
        present |= {each for each in self._records if each[0] not in self._read and self._identity_of(each[0]) == each}
        self._examined &= present
        self._refused &= present
        self._records = {identity: record for identity, record in self._records.items() if identity in present}

    def notices(self) -> Iterator[Notice]:
        """Iterate over the notices about users whose processes were not all looked at."""
        for notice in self._users.notices():
            self.is_skipping = True
            yield notice

    @property
    def count(self) -> int:
        """Number of processes that have the patch."""
        return len(self._records)

    def restore(self) -> Iterator[tuple[int, PatchRecord, EngineError | None]]:
        """
        Remove the patch from all processes, children included that have copied it meanwhile.

        Yield process id and record for each; with an error, the patch stays.
        """
        failed: set[_Identity] = set()
        while True:
            for pid in self._mapping(is_limited=False):  # children that were forked since the last look
                identity = self._identity_of(pid)
                if identity is not None and identity not in self._records and (own := self._inherited(pid)) is not None:
                    self._records[identity] = own
            left = [identity for identity in self._records if identity not in failed]
            if not left:
                return
            for identity in left:
                pid, record, error = identity[0], self._records[identity], None
                if self._identity_of(pid) == identity:
                    try:
                        if not remove_patch(pid, record) and self._identity_of(pid) == identity:
                            error = EngineError(
                                f"'{record.function}' no longer has the jump of the patch: nothing was restored"
                            )
                    except EngineError as problem:
                        error = problem
                    yield pid, record, error
                if error is None:
                    del self._records[identity]
                else:
                    failed.add(identity)

    def _mapping(self, *, is_limited: bool = True) -> Iterator[int]:
        """
        Iterate over the ids of the processes that map the file as code, without those of dprobes.

        If ``is_limited``, processes of users who have used up their time are left out.
        """
        own = os.getpid()
        self.closed = 0
        self._read.clear()
        pids = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
        for pid in (each for each, _ in self._users.bounded(pids)) if is_limited else pids:
            try:
                mappings, _ = code_mappings(pid)
                self._read.add(pid)
            except TargetError as error:
                self.closed += isinstance(error.__cause__, PermissionError)
                continue
            except OSError:
                continue
            if pid != own and any((each.device, each.inode) == self._file for each in mappings) and not is_dprobes(pid):
                yield pid

    def _patched(self, pid: int, identity: _Identity) -> ProcessResult:
        name = command_name(pid)
        try:
            if (record := self._inherited(pid)) is not None:
                self._records[identity] = record
                return ProcessResult(pid, name)
            place = next(each for each in code_mappings(pid)[0] if (each.device, each.inode) == self._file)
            function = f"{place.path}:{self._name}"
            planned = plan_patch(
                pid, self._path, self._symbol, function, self._build_id, replaces=self._replaces, foreign=self._foreign
            )
            inserted = insert_patch(planned, idle=self._idle)
        except StopIteration:
            return ProcessResult(pid, name, error=TargetError(f"process {pid} has unmapped '{self.module}'"))
        except DprobesError as error:
            return ProcessResult(pid, name, error=error)
        self._records[identity] = inserted.record
        return ProcessResult(pid, name, planned, inserted)

    def _identity_of(self, pid: int) -> _Identity | None:
        """Return the identity of a process; None if it has ended."""
        start, stack = start_time(pid), first_stack_of(pid)
        if not start:
            return None
        if stack is not None:
            return pid, start, stack
        if thread_state(pid) in _ENDED:
            return None
        return next((each for each in self._records if each[:2] == (pid, start)), (pid, start, None))

    def _inherited(self, pid: int) -> PatchRecord | None:
        """Return the record that a process has copied from one that was patched; None if it has none in effect."""
        known = set(self._records.values())
        try:
            return next((each for each in patches_of(pid) if each in known and is_active(pid, each)), None)
        except DprobesError:
            return None


def _file_in_maps(path: Path) -> tuple[int, int]:
    """
    Return device and inode of a file as mappings of it show them, which may differ from stat(2).

    Raise ``TargetError`` if the file cannot be mapped.
    """
    import ctypes

    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 1, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as own,
        ):
            view = ctypes.c_char.from_buffer(own)
            mapping = mapping_at(os.getpid(), ctypes.addressof(view))
            del view
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "it is empty"
        raise TargetError(f"'{path}' cannot be mapped: {reason}") from error
    assert mapping is not None, "it is mapped"
    return mapping.device, mapping.inode

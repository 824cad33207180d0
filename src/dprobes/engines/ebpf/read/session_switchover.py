"""
Replacement of a session by another one, hit by hit (``bpf.lower.hits.hit_prologue``).

All steps that can fail come first, and do not change the old session: the new program is loaded and attached while no
hit belongs to it. Then a word in memory switches all handlers at once, and the old links are closed.

While a session is being replaced, no BPF program may be attached for it, because at a hit the kernel runs programs in
the reverse order of their attachment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Alu, Atomic, Register
from dprobes.bpf.map_layouts import MapName, SwitchOver
from dprobes.engines.ebpf.kernel.bpf_links import attach_uprobes, uprobe_attach_type
from dprobes.engines.ebpf.kernel.bpf_objects import ArrayMap, Descriptor, explained, finished, load
from dprobes.errors import EngineError, NotSupportedError
from dprobes.platform.linux.bpf_calls import ProgramType
from dprobes.platform.linux.call_proxy import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.engines.ebpf.attach.installation import Installation
    from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors
    from dprobes.engines.ebpf.kernel.kernel_features import Features
    from dprobes.engines.engine_interface import Attachment, Job

__all__ = ["Barrier", "ReplaceableSession", "Replacement", "runs_newest_first", "session_to_replace"]

_CODE = bytes.fromhex("55 5d c3")  # push %rbp; pop %rbp; ret


class PrivateSite(Descriptor):
    """
    A site for uprobes that only this process executes: a few instructions in a memfd.

    The methods raise OSError with the kernel's error, or a ``DprobesError``.
    """

    def __init__(self, features: Features) -> None:
        super().__init__(os.memfd_create("dprobes-site"))
        self._features = features
        os.write(self.fd, _CODE)

    def attach(self, assembled: Assembled, maps: Mapping[MapName, int]) -> Descriptors:
        """Load a BPF program, and attach it as a uprobe to the memfd until the result is closed."""
        attach_type = uprobe_attach_type(self._features)
        program = load(assembled, maps, ProgramType.KPROBE, attach_type=attach_type, name="place")
        try:
            return attach_uprobes(program, f"/proc/self/fd/{self.fd}", [(0, 0)], self._features)
        finally:
            os.close(program)

    def execute(self) -> None:
        """Execute the instructions in this process. Their page remains mapped."""
        ctypes.CFUNCTYPE(None)(map_file(self.fd, len(_CODE)))()


class Barrier:
    """
    Barrier for one use: ``wait`` returns when all hits that had begun before it are over.

    It removes a uprobe, because the kernel then waits for all running handlers of all uprobes
    (``uprobe_unregister_sync``). Before Linux 6.12, handlers run under a lock of their uprobe, and no wait is needed.
    """

    def __init__(self, features: Features) -> None:
        """
        Attach an empty BPF program to a site that is not executed.

        Raise OSError or a ``DprobesError`` if that fails.
        """
        with PrivateSite(features) as place:
            self._links = place.attach(finished(Assembler()), {})

    def wait(self) -> None:
        """Wait until all hits that have begun are over. A second call does nothing."""
        self._links.close()


_PROGRAMS = 3


def runs_newest_first(features: Features) -> bool:
    """
    Return True if a uprobe runs later attached BPF programs first; raise OSError with the kernel's error.

    Replacement depends on this order (``bpf.lower.hits.hit_prologue``), which is not documented. The list of a uprobe's
    consumers grows at its head (``consumer_add`` in ``kernel/events/uprobes.c``), before and since Linux kernel commit
    cc01bd044e6a ("uprobes: travers uprobe's consumer list locklessly under SRCU protection") (in v6.12).
    """
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(PrivateSite(features))
        table = stack.enter_context(ArrayMap(8 * (1 + _PROGRAMS), name="dprobes_order"))
        for number in range(_PROGRAMS):
            stack.callback(place.attach(_noting(number), {MapName.STATUS: table.fd}).close)
        place.execute()
        return list(table.words) == [_PROGRAMS, *range(_PROGRAMS, 0, -1)]


def _noting(number: int) -> Assembled:
    """Return a BPF program that increments word 0 of an array, and stores the result in its word ``number + 1``."""
    asm = Assembler()
    asm.load_value(Register.R1, MapName.STATUS)
    asm.mov(Register.R2, 1)
    asm.atomic(Atomic.ADD, Register.R1, 0, Register.R2, fetch=True)
    asm.alu(Alu.ADD, Register.R2, 1)
    asm.store(Register.R1, 8 * (1 + number), Register.R2)
    return finished(asm)


@runtime_checkable
class ReplaceableSession(Protocol):
    """A session that another one may replace, if ``is_replaceable``."""

    @property
    def is_replaceable(self) -> bool:
        """True if another session may replace this one."""

    def held_still(self) -> AbstractContextManager[Installation | None]:
        """
        Return a context manager that prevents changes in the kernel.

        It yields the installation, None after the end.
        """

    def end_replaced(self) -> None:
        """End the session, because another session has replaced it."""

    def breakpoints_in(self, descriptor: int) -> frozenset[int]:
        """Return the file offsets of the breakpoints in an open file."""


def session_to_replace(features: Features, job: Job) -> ReplaceableSession:
    """Return the session that a job replaces; raise a ``DprobesError`` if it cannot be replaced."""
    assert job.replaces is not None, "the job replaces a session"
    old = _checked(job.replaces)
    if job.scope.command:
        raise NotSupportedError(
            "a program that starts a command cannot replace another one",
            hint="replace the program for the process that runs already (-p PID)",
        )

    with explained("the test before a replacement"):
        is_possible = features.remembered(runs_newest_first)
    if not is_possible:
        raise NotSupportedError(
            "programs cannot be replaced on this kernel: it does not run the handlers of a place from the newest to "
            "the oldest",
            hint="remove the inserted program, then insert the new one",
        )
    return old


def _checked(session: Attachment) -> ReplaceableSession:
    if not isinstance(session, ReplaceableSession):
        raise EngineError(
            "the ebpf engine replaces only programs of the ebpf engine",
            hint="remove the inserted program, then insert the new one",
        )
    if not session.is_replaceable:
        raise EngineError(
            "the inserted program was not inserted as a replaceable one",
            hint="remove it, and insert the new one",
        )
    return session


class Replacement:
    """Replacement of a session, which cannot change meanwhile. ``old`` is its installation, or None if it has ended."""

    def __init__(self, session: ReplaceableSession, old: Installation | None, features: Features) -> None:
        self._session = session
        self._old = old
        self._features = features

    @classmethod
    @contextlib.contextmanager
    def of(cls, session: ReplaceableSession, features: Features) -> Iterator[Replacement]:
        """Yield the replacement of a session. The old session continues unless the caller calls ``take_over``."""
        with session.held_still() as old:
            yield cls(session, old, features)

    def take_over(self, new: Installation) -> None:
        """Switch the hits to the attached program ``new``, and end the old session."""
        if self._old is None:
            new.maps.set_switch_over(SwitchOver.OURS)
            return

        with explained("the switch from the old program to the new one"):
            self._old.maps.set_successor(new.maps)
            barrier = Barrier(self._features)
        # The order matters: a thread that finds the new program CROSSING must find the old one REPLACED.
        self._old.maps.set_switch_over(SwitchOver.REPLACED)
        new.maps.set_switch_over(SwitchOver.CROSSING)
        # At a hit, the new program may just have read NOT_OURS. The hit would not reach the old program any more if the
        # latter were removed from the uprobe's list of consumers now (list_del_rcu).
        barrier.wait()
        # After this, no handler of the old program runs any more, even if a forked process still has a descriptor of a
        # link.
        self._old.detach()
        self._old.maps.set_switch_over(SwitchOver.NOT_OURS)
        new.maps.set_switch_over(SwitchOver.OURS)
        self._session.end_replaced()

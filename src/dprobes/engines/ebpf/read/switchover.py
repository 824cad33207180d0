"""
How a session takes the place of another one, hit by hit (``bpf.lower.hits.switchover``).

Everything that can fail comes first, and leaves the other session as it is: the new program is loaded and attached
while no hit is its own. Then a word in memory decides, for all handlers at once, and the old links are closed.

While a session is being replaced, nobody may attach anything for it: a program that is attached later runs earlier.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.bpf.layout import SwitchOver
from dprobes.engines.ebpf.kernel.refusal import explained
from dprobes.engines.ebpf.replaceable import ReplaceableSession
from dprobes.errors import EngineError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ebpf.attach.installation import Installation
    from dprobes.engines.ebpf.kernel.features import Features
    from dprobes.engines.interface import ControlledSession, Job

__all__ = ["Replacement", "session_to_replace"]


def session_to_replace(features: Features, job: Job) -> ReplaceableSession | None:
    """Return the session that a job's is to replace; raise an error of ours if it cannot."""
    if job.replaces is None:
        return None
    old = _checked(job.replaces)
    if job.scope.command:
        raise NotSupportedError(
            "a program that starts a command cannot replace another one",
            hint="replace the program for the process that runs already (-p PID)",
        )
    from dprobes.engines.ebpf.kernel.programorder import runs_newest_first

    with explained("the trial that replacing a program begins with"):
        is_possible = features.remembered(runs_newest_first)
    if not is_possible:
        raise NotSupportedError(
            "programs cannot be replaced on this kernel: it does not run the handlers of a place from the newest to "
            "the oldest",
            hint="remove the program that is there, and insert the new one",
        )
    return old


def _checked(session: ControlledSession) -> ReplaceableSession:
    if not isinstance(session, ReplaceableSession):
        raise EngineError(
            "only a program of the ebpf engine can be replaced by one of it",
            hint="remove the program that is there, and insert the new one",
        )
    if not session.is_replaceable:
        raise EngineError(
            "the program that is there has not been inserted as one that can be replaced",
            hint="remove it, and insert the new one",
        )
    return session


class Replacement:
    """A session that is held still to be replaced; ``old`` is its program in the kernel, None if it is at its end."""

    def __init__(self, session: ReplaceableSession, old: Installation | None, features: Features) -> None:
        self._session = session
        self._old = old
        self._features = features

    @classmethod
    @contextlib.contextmanager
    def of(cls, session: ReplaceableSession | None, features: Features) -> Iterator[Replacement | None]:
        """Return the replacement of a session if there is one; it goes on as before where no ``take_over`` follows."""
        if session is None:
            yield None
            return
        with session.held_still() as old:
            yield cls(session, old, features)

    def take_over(self, new: Installation) -> None:
        """Let the hits be those of a program that has been attached meanwhile; the old session comes to its end."""
        if self._old is None:
            new.maps.set_switch_over(SwitchOver.OURS)
            return
        from dprobes.engines.ebpf.kernel.privatesite import Barrier

        with explained("what tells the old program from the new one"):
            self._old.maps.set_successor(new.maps)
            barrier = Barrier(self._features)
        # In this order: whoever finds the new one CROSSING must find the old one REPLACED.
        self._old.maps.set_switch_over(SwitchOver.REPLACED)
        new.maps.set_switch_over(SwitchOver.CROSSING)
        # A hit at which the new program has just read NOT_OURS would not reach the old one any more if that were taken
        # out of the list of its place now (list_del_rcu).
        barrier.wait()
        # When this returns, no handler of the old program runs any more; and none ever will, should a process that has
        # just been forked hold a descriptor of ours still.
        self._old.detach()
        self._old.maps.set_switch_over(SwitchOver.NOT_OURS)
        new.maps.set_switch_over(SwitchOver.OURS)
        self._session.end_replaced()

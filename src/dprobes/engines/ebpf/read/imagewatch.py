"""The mappings of the processes of a scope, from the kernel's news of them: for names and stacks of those that end."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.attach.scopecontent import descendants
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from dprobes.engines.ebpf.kernel.processnews import News, ProcessNews
    from dprobes.engines.interface import Scope
    from dprobes.target.processimages import ProcessImages

__all__ = ["ImageWatch"]


class ImageWatch:
    """
    The watch that enters in ``images`` what the processes of a scope map, execute and fork from now on.

    Of a tree, ``pid`` is the process that it begins with, or is to begin with when that executes its program: no other
    process than those of the tree is told of. Where the kernel does not tell us there are no names for what has ended,
    but everything else.
    """

    def __init__(self, images: ProcessImages, scope: Scope, pid: int | None = None) -> None:
        self._images = images
        self._looking = threading.Lock()
        self._news: ProcessNews | None = None
        self._follow = scope.follow
        self._tree: set[int] | None = None
        from dprobes.engines.ebpf.kernel.processnews import ProcessNews
        from dprobes.target.processmaps import code_mappings, command_name

        with contextlib.suppress(OSError):
            self._news = ProcessNews()
        if pid is None:
            return
        self._tree = {pid}
        if scope.is_command:
            return
        if scope.follow:
            self._tree.update(descendants(pid))
        for each in self._tree:
            with contextlib.suppress(TargetError):
                images.began(each, 0, code_mappings(each)[0], command_name(each))

    def look(self) -> None:
        """Tell what has happened since the last call; any thread may want to know."""
        images = self._images
        from dprobes.engines.ebpf.kernel.processnews import Executed, ForkedProcess, MappedFile

        with self._looking:
            for each in self._news.take() if self._news is not None else ():
                if not self._is_of_scope(each):
                    continue
                match each:
                    case Executed(time, pid, name):
                        images.began(pid, time, name=name)
                    case MappedFile(time, pid, mapping):
                        images.mapped(pid, time, mapping)
                    case ForkedProcess(time, pid, parent):
                        images.forked(pid, parent, time)

    def _is_of_scope(self, each: News) -> bool:
        from dprobes.engines.ebpf.kernel.processnews import ForkedProcess

        if self._tree is None:
            return True
        if isinstance(each, ForkedProcess):
            if self._follow and each.parent in self._tree:
                self._tree.add(each.pid)
            else:
                self._tree.discard(each.pid)  # the number was that of a process that has ended
        return each.pid in self._tree

    def close(self) -> None:
        """Hear no more."""
        with self._looking:
            if self._news is not None:
                self._news.close()
                self._news = None

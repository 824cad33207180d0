"""What processes map, as the kernel tells of all of them, for the names and stacks of those that end soon."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.errors import TargetError

if TYPE_CHECKING:
    from dprobes.engines.ebpf.kernel.processnews import ProcessNews
    from dprobes.target.processimages import ProcessImages

__all__ = ["ImageWatch"]


class ImageWatch:
    """
    Tell ``images`` what processes map, execute and fork from now on.

    ``pid`` is a process that runs already. Where the kernel does not tell us there are no names for what has ended, but
    everything else.
    """

    def __init__(self, images: ProcessImages, pid: int | None = None) -> None:
        self._images = images
        self._news: ProcessNews | None = None
        from dprobes.engines.ebpf.kernel.processnews import ProcessNews
        from dprobes.target.processmaps import command_name, executable_mappings, read_maps

        with contextlib.suppress(OSError):
            self._news = ProcessNews()
        if pid is not None:
            with contextlib.suppress(TargetError):
                images.began(pid, 0, executable_mappings(read_maps(pid)), command_name(pid))

    def look(self) -> None:
        """Tell what has happened since the last call."""
        images = self._images
        if self._news is None:
            return
        from dprobes.engines.ebpf.kernel.processnews import Executed, ForkedProcess, MappedFile

        for each in self._news.take():
            match each:
                case Executed(time, pid, name):
                    images.began(pid, time, name=name)
                case MappedFile(time, pid, mapping):
                    images.mapped(pid, time, mapping)
                case ForkedProcess(time, pid, parent):
                    images.forked(pid, parent, time)

    def close(self) -> None:
        """Hear no more."""
        if self._news is not None:
            self._news.close()
            self._news = None

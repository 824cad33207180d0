"""
How the out-of-memory killer rates processes of ours (``oom_score_adj``, proc(5)).

It must not take the tracer before others: that is small, and its end may be the end of what it traces.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["SPARED", "copy_score", "set_score", "spare_process"]

SPARED = -900
"""The score of a tracer: nearly everything else is taken before, but a cgroup with nothing else gets its memory."""


def set_score(pid: int, score: int) -> None:
    """Set the score of a process; raise OSError if that is not allowed (to lower it takes CAP_SYS_RESOURCE)."""
    _file(pid).write_text(f"{score}\n")


def spare_process() -> None:
    """Give this process the score of a tracer, if that is allowed; ``dprobes doctor`` says whether it is."""
    with contextlib.suppress(OSError):
        set_score(os.getpid(), SPARED)


def copy_score(source: int, pid: int) -> None:
    """Give a process the score of another one, if that is there and it is allowed."""
    with contextlib.suppress(OSError):
        _file(pid).write_text(_file(source).read_text())


def _file(pid: int) -> Path:
    return Path(f"/proc/{pid}/oom_score_adj")

"""The socket for what the kernel says never makes anybody wait."""

from __future__ import annotations

from dprobes.platform.linux.kernel_events import KernelEvents


def test_nothing_waits_for_events() -> None:
    events = KernelEvents()
    assert events.descriptor >= 0
    assert events.drain()[1] is False
    events.close()
    assert events.descriptor == -1

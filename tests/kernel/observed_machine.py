"""A run of dprobes on this machine that looks at a guest through QEMU's stub."""

from __future__ import annotations

import json
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from guests.guest import Guest
    from integration.support import Result, Runner

__all__ = ["Observed", "observed", "words_of"]

GETPPID = (str(PYTHON), "-S", "-c", "import os; os.getppid()")


class Observed:
    """A run of dprobes on this machine; the result is there when ``stop`` has been called."""

    def __init__(self, guest: Guest, runner: Runner, text: str, socket: Path, options: list[str], **popen: Any) -> None:
        self.guest = guest
        self._runner = runner
        self.client, self._output = runner.start(text, [], ["--engine", f"gdb={socket}", *options], **popen)

    @property
    def lines(self) -> list[dict[str, Any]]:
        text = self._output.read_text() if self._output.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def await_record(self, command: Sequence[str] = GETPPID, given: bytes = b"") -> None:
        """Wait until the first hit was logged; a command leads to it that runs in the guest."""
        deadline = time.monotonic() + 60
        while not self.lines:
            assert self.client.poll() is None, self.client.communicate()[1]
            assert time.monotonic() < deadline, "no record came"
            self.guest.run(command, input=given)

    def await_last(self, is_last: Callable[[dict[str, Any]], bool]) -> int:
        """Wait for a record that comes behind all of what was done before; return how many there are then."""
        self.guest.wait_until(lambda: any(map(is_last, self.lines)), "the last record", 60)
        return len(self.lines)

    def stop(self) -> Result:
        return self._runner.end(self.client, self._output)


@contextmanager
def observed(guest: Guest, run: Runner, text: str, tmp_path: Path, *options: str, **popen: Any) -> Iterator[Observed]:
    socket = tmp_path / "stub"
    if not socket.exists():
        guest.open_stub(socket)
    seen = Observed(guest, run, text, socket, list(options), **popen)
    try:
        yield seen
    finally:
        if seen.client.poll() is None:  # the machine is to go on, whatever the test has found
            seen.client.send_signal(signal.SIGINT)
            seen.client.communicate(timeout=60)


def words_of(record: dict[str, Any]) -> list[int]:
    data = bytes.fromhex(record["data"])
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]

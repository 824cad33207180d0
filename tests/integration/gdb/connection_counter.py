"""A socket before that of a stub, which counts how often somebody connects."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

__all__ = ["ConnectionCounter"]

_CHUNK = 1 << 16


class ConnectionCounter:
    """Pass on what is said at ``path`` to the stub at another one; ``count`` is how many connections there were."""

    def __init__(self, path: Path, stub: Path) -> None:
        self.path, self.count = path, 0
        self._stub = stub
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._connections):
            each.close()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # it was closed
                return
            self.count += 1
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(self._stub))
            self._connections += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(_CHUNK):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # the other end has gone, or the test is over
        pass

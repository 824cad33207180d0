"""The connection of a manager and its client."""

from __future__ import annotations

import socket

from dprobes.manager.wire_protocol import Connection


def test_who_leaves_a_connection_closes_it() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with Connection(ours):
            pass
        assert ours.fileno() == -1
        assert theirs.recv(1) == b""

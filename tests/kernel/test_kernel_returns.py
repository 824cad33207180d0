"""Returns of functions that call themselves, and of those that interrupts enter again: as many as entries, in turn."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from collections.abc import Iterable

    from guests.guest import Guest

pytestmark = pytest.mark.shared_guest

HEADER = "name = vmlinux\nmodtype = kernel\nmajor = 7\n"
ENTRY, RETURN = 1, 2

HANDLERS = {"registers of ftrace": "exit\n", "all registers": "push r, ebx\nlog 1\nexit\n"}
"""What decides whether ftrace calls the handler or a kprobe does, where a kernel has both."""

ROUNDS = 40
DEPTH = 3
CHAINS = f"""
import select
for _ in range({ROUNDS}):
    chain = [select.epoll() for _ in range({DEPTH} + 1)]
    for outer, inner in reversed(list(zip(chain, chain[1:]))):
        outer.register(inner.fileno())
"""
"""With each of these registrations the kernel looks into all inner ones, one in the other, for a loop."""

MESSAGES = 100
EXCHANGE = f"""
import socket
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
for one in (client, server):
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range({MESSAGES}):
    client.send(bytes(20_000))
    left = 20_000
    while left:
        left -= len(server.recv(left))
    server.send(b"x")
    client.recv(1)
"""


def run(guest: Guest, function: str, handler: str, code: str) -> list[dict[str, Any]]:
    """Run code with a probepoint at the entry of a function, and one at its return; return the records in order."""
    text = (
        f"offset = {function}\nminor = {ENTRY}\n{handler}offset = {function}\nreturn = yes\nminor = {RETURN}\n{handler}"
    )
    guest.put("/tmp/program.rpn", HEADER + text)
    guest.put("/tmp/code.py", code)
    options = ("--format", "json", "--log", "tsc,tid", "--overhead", "off", "--", str(PYTHON), "/tmp/code.py")
    done = guest.dprobes("run", "/tmp/program.rpn", *options)
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda record: record["time"])


def depths(records: Iterable[dict[str, Any]]) -> list[int]:
    """Return how many calls are under way in a thread after each of its records."""
    depth, found = 0, []
    for record in records:
        depth += 1 if record["minor"] == ENTRY else -1
        found.append(depth)
    return found


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=list(HANDLERS))
def test_a_function_that_is_entered_again_returns_as_often(guest: Guest, handler: str) -> None:
    """
    One calls itself; one is called in the interrupt that a call of it has raised.

    What is sent on the loopback device is received, and answered, before the call that sends it has returned.
    """
    found = depths(run(guest, "ep_loop_check_proc", handler, CHAINS))
    expected = [depth for top in range(1, DEPTH + 1) for depth in (*range(1, top + 1), *range(top - 1, -1, -1))]
    assert found == expected * ROUNDS
    records = run(guest, "__ip_queue_xmit", handler, EXCHANGE)
    assert len(records) >= 4 * MESSAGES
    found = depths(record for record in records if record["tid"] == records[0]["tid"])
    assert (found[-1], min(found)) == (0, 0)
    assert max(found) >= 2

"""
A stub that lies: it stands before gdbserver, and changes what that says, as its seed says.

    lyingstub.py SEED PROGRAM [ARGUMENT]...    prints the number of a port, at which it accepts one connection
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FLOOD = 20_000
NUMBERS = ("0", "-1", "1", "7fffffff", "ffffffff", "ffffffffffffffff", "1" + 40 * "0", "8000000000000000", "")
STOPS = (
    b"T05thread:999;",
    b"T05",
    b"W00",
    b"W00;process:999",
    b"X09",
    b"T05swbreak:;thread:p1.1;",
    b"T05library:;",
    b"T05fork:p5.5;thread:p1.1;",
    b"T05vforkdone:;",
    b"T05exec:" + 4000 * b"2f" + b";",
    b"T05watch:0;",
    b"T05syscall_entry:0;",
    b"N",
    b"F0,0",
    b"O" + 400 * b"1b5d303b78070a",
    b"S",
    b"Tzz",
    b"m" + b",".join(b"p1.%x" % n for n in range(20_000)),
    b"l",
    b"E01",
    b"OK",
)


def packet(payload: bytes) -> bytes:
    return b"$" + payload + b"#%02x" % (sum(payload) % 256)


class Liar:
    """Changes of what a stub says."""

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)
        self._rate = self._choose.choice((0.003, 0.02, 0.1, 0.5))
        self._honest = self._choose.choice((0, 0, 20, 100))
        """How many answers are true before the first lie."""
        self._former = [b"OK"]
        ways: list[Callable[[bytes], bytes]] = [
            self._digits, self._cut, self._nothing, self._error, self._bytes, self._flood, self._former_one,
            self._number, self._stop, self._twice, self._half, self._stop,
        ]  # fmt: skip
        self._ways = self._choose.sample(ways, 2)
        self.is_silent = False

    def said(self, payload: bytes) -> bytes:
        """Return the bytes that are sent instead of an answer."""
        self._former.append(payload)
        self._honest -= 1
        if self._honest > 0 or self._choose.random() > self._rate:
            return packet(payload)
        if self._choose.random() < 0.005:
            self.is_silent = True
        return self._choose.choice(self._ways)(payload)

    def _digits(self, payload: bytes) -> bytes:
        changed = bytearray(payload)
        for _ in range(self._choose.randrange(1, 9)):
            if changed:
                changed[self._choose.randrange(len(changed))] = self._choose.choice(b"0123456789abcdef;:,.-xz")
        return packet(bytes(changed))

    def _cut(self, payload: bytes) -> bytes:
        return packet(payload[: self._choose.randrange(len(payload) + 1)])

    def _nothing(self, _: bytes) -> bytes:
        return packet(b"")

    def _error(self, _: bytes) -> bytes:
        return packet(self._choose.choice((b"E01", b"E", b"Ezz", b"E.\033[2J\n" + 2000 * b"x")))

    def _bytes(self, _: bytes) -> bytes:
        return self._choose.randbytes(self._choose.choice((1, 10, 1000, 100_000)))

    def _flood(self, payload: bytes) -> bytes:
        return FLOOD * self._choose.choice((b"+", b"-", packet(b"O41"), b"%Stop:T05#00", packet(payload[:20])))

    def _former_one(self, _: bytes) -> bytes:
        return packet(self._choose.choice(self._former))

    def _number(self, payload: bytes) -> bytes:
        head = payload[: self._choose.randrange(1 + min(len(payload), 12))]
        return packet(head + self._choose.choice(NUMBERS).encode())

    def _stop(self, _: bytes) -> bytes:
        return packet(self._choose.choice(STOPS))

    def _twice(self, payload: bytes) -> bytes:
        return 2 * packet(payload)

    def _half(self, payload: bytes) -> bytes:
        return packet(payload)[: -self._choose.randrange(1, 3 + len(payload))]


def answers(stub: subprocess.Popen[bytes], connection: socket.socket, liar: Liar) -> None:
    """Send what gdbserver says, packet by packet."""
    assert stub.stdout is not None
    rest = b""
    with contextlib.suppress(OSError):
        while data := stub.stdout.read1(1 << 16):  # type: ignore[attr-defined]
            rest += data
            while rest:
                if rest[:1] != b"$":
                    start = rest.find(b"$")
                    connection.sendall(rest if start < 0 else rest[:start])
                    rest = b"" if start < 0 else rest[start:]
                    continue
                end = rest.find(b"#")
                if end < 0 or len(rest) < end + 3:
                    break
                payload, rest = rest[1:end], rest[end + 3 :]
                said = liar.said(payload)
                if liar.is_silent:
                    return
                connection.sendall(said)
        connection.shutdown(socket.SHUT_RDWR)


def main() -> None:
    seed, *command = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    stub = subprocess.Popen(["gdbserver", "--once", "-", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert stub.stdin is not None
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            print(server.getsockname()[1], flush=True)
            connection, _ = server.accept()
        with connection:
            threading.Thread(target=answers, args=(stub, connection, Liar(int(seed))), daemon=True).start()
            with contextlib.suppress(OSError):
                while data := connection.recv(1 << 16):
                    stub.stdin.write(data)
                    stub.stdin.flush()
    finally:
        stub.kill()
        stub.wait()


if __name__ == "__main__":
    main()

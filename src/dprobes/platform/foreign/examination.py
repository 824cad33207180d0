"""
Process that reads foreign files: ``python -m dprobes.platform.foreign.examination DESCRIPTOR``.

It receives questions, each with an open file, from the socket ``DESCRIPTOR``. It forks a child for each question. A
malicious file can only exhaust the limits of the child, which is then killed. The child writes its answer as JSON to a
memfd (``foreign_outlines``).
"""

from __future__ import annotations

import contextlib
import enum
import gc
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dprobes.errors import DprobesError, SourceError, TargetError
from dprobes.platform.foreign.foreign_outlines import ANSWER_MAX, Question, write_answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["LENGTH", "Limits", "Outcome", "serve"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for examining a file: address space in bytes (RLIMIT_AS), CPU time and elapsed time in seconds."""

    memory: int = 1 << 30
    processor_time: int = 10
    time: int = 20


LENGTH = struct.Struct("=Q")
"""
Header of a question: the size of its pickled payload in bytes.

The descriptor of the file is attached (SCM_RIGHTS).
"""

_IDLE_TIME = 30.0
"""Seconds without a question after which the process exits. The client starts a new process for its next question."""


class Outcome(enum.Enum):
    """
    Result of an examination, sent to the client as one byte.

    With ANSWER, the message carries the descriptor of a memfd.
    """

    ANSWER = b"a"
    NO_TIME = b"t"
    NO_MEMORY = b"m"
    FAILED = b"f"


def serve(connection: socket.socket) -> None:
    """
    Answer a client's questions about files until it closes the connection, or asks none for ``_IDLE_TIME``.

    Each file is examined in a forked child with limits.
    """
    # The out-of-memory killer shall kill this process before any other, because others do not depend on it.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.nice(5)
    _load_what_is_needed()
    gc.freeze()
    connection.settimeout(_IDLE_TIME)
    with contextlib.suppress(TimeoutError, ConnectionError):
        while True:
            head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
            if len(head) < LENGTH.size or not descriptors:
                return
            (length,) = LENGTH.unpack(head)
            _answer(connection, descriptors[0], _receive(connection, length))
            os.close(descriptors[0])


def _receive(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = connection.recv(min(length, 1 << 20))
        if not part:
            raise ConnectionError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _load_what_is_needed() -> None:
    """Import the modules that examining a file needs, so that forked children need not do so."""
    import iced_x86  # noqa: F401 - so that it is loaded

    import dprobes.resolve.breakpoints
    import dprobes.resolve.probepoints
    import dprobes.target.code.uprobe_sites
    import dprobes.target.module_outline  # noqa: F401 - as above


def _answer(connection: socket.socket, descriptor: int, payload: bytes) -> None:
    output = os.memfd_create("dprobes-answer")
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(_work(descriptor, payload, output))
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            socket.send_fds(connection, [Outcome.ANSWER.value], [output])
        else:
            connection.sendall(_failure(status).value)
    finally:
        os.close(output)


def _failure(status: int) -> Outcome:
    """Return the outcome for a child that has sent no answer, by its wait status."""
    if os.WIFEXITED(status):
        return Outcome.NO_MEMORY if os.WEXITSTATUS(status) == _NO_MEMORY else Outcome.FAILED
    # Other allocators than Python's abort without memory; a SIGKILL may also be for lack of memory.
    return Outcome.NO_TIME if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM) else Outcome.NO_MEMORY


# The child

_NO_MEMORY = 2
"""Exit status of a child that ran out of memory."""


def _work(descriptor: int, payload: bytes, output: int) -> int:
    """
    Set the limits, examine an open file, and write the answer to the descriptor ``output``.

    Return the exit status of the child, which is 0 on success. Raise no exception.
    """
    try:
        question, limits = pickle.loads(payload)  # from the process that has started us  # noqa: S301
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limits.time)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (limits.processor_time, limits.processor_time + 1))
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
        text = json.dumps(_examined(question, Path(f"/proc/self/fd/{descriptor}")), separators=(",", ":")).encode()
        if len(text) > ANSWER_MAX:
            return 1
        while text:
            text = text[os.write(output, text) :]
    except MemoryError:
        return _NO_MEMORY
    except BaseException:  # noqa: BLE001 - any error ends this process only
        return 1
    return 0


def _examined(question: Question, reached: Path) -> dict[str, Any]:
    try:
        return _examine(question, reached)
    except SourceError as error:
        return {"kind": "source", "error": error.message[:4000]}
    except DprobesError as error:
        return {"kind": "target", "error": error.message[:4000], "hint": error.hint and error.hint[:1000]}


def _examine(question: Question, reached: Path) -> dict[str, Any]:
    from dprobes.diagnostics import Diagnostics
    from dprobes.resolve.local_module import resolve
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.module_outline import cheap_sites_in
    from dprobes.target.probed_module import OWN_SYMBOLS

    elf = ElfFile.open(question.path, reached)
    is_meant = question.soname is None or elf.soname == question.soname
    if not is_meant and not question.own_functions:
        return {"meant": False}
    own_places = _own_places(elf, question.own_functions)
    if question.program is None or not is_meant:
        return write_answer(OWN_SYMBOLS.module_of(elf), None, moves={}, own_places=own_places)
    module = question.symbols.module_of(elf)
    resolved = resolve(question.program, module, Diagnostics(), allow_write=question.allow_write)
    moves: dict[int, int] = {}
    if question.wants_moves:
        from dprobes.resolve.breakpoints import movable_probes

        probes = movable_probes(resolved)
        found = cheap_sites_in(module, [probe.instruction for probe in probes])
        moves = {probe.offset: moved for probe, moved in zip(probes, found, strict=True) if moved}
    return write_answer(module, resolved, moves=moves, own_places=own_places)


def _own_places(elf: ElfFile, names: tuple[str, ...]) -> Mapping[str, int]:
    from dprobes.target.probed_module import OWN_SYMBOLS

    if not names:
        return {}
    module, found = OWN_SYMBOLS.module_of(elf), {}
    for name in names:
        with contextlib.suppress(TargetError):
            found[name] = module.file_offset(module.address_of(name))
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that has started this one
    serve(socket.socket(fileno=int(sys.argv[1])))

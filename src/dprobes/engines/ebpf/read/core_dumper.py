"""
Core files for ``exit 3``: the core dump of a process that a handler has stopped, written by another process.

The writer's command is ``python -m dprobes.engines.ebpf.read.core_dumper PID TID STOPS``. It traces the threads with
ptrace while it writes the file to standard output. It reads the original bytes of breakpoints from standard input, and
writes errors to standard error. When it exits, the kernel resumes the threads. STOPS is the descriptor of the list of
stopped processes (``stop_guard``), in which the writer records that the process was resumed.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dprobes.engines.ebpf.read.stop_guard import CoreStops, await_stop
from dprobes.errors import reason_of
from dprobes.target.process_maps import code_mappings

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable, Mapping

    from dprobes.engines.engine_interface import Notice

__all__ = ["Dump", "breakpoints_in", "main", "start_dump"]

_I386_REGISTERS_SIZE = 17 * 4


@dataclass(slots=True, eq=False)
class Dump:
    """A core file of a stopped process that a separate process writes."""

    pid: int
    name: str
    path: str
    writer: subprocess.Popen[bytes]
    stops: CoreStops

    @property
    def is_done(self) -> bool:
        """True if the process that writes the core file has ended."""
        return self.writer.poll() is not None

    def finish(self, *, abandoned: bool = False) -> Notice:
        """
        Wait for the writer, or kill it if ``abandoned``; resume the process, and return the notice for the user.

        An incomplete file is deleted.
        """
        from dprobes.engines.engine_interface import no_core_notice, written_notice

        if abandoned:
            self.writer.kill()
        _, complaint = self.writer.communicate()
        self.stops.let_go_on(self.pid)  # unless the writer has done that itself
        if self.writer.returncode == 0:
            return written_notice(self.pid, self.name, self.path, os.stat(self.path).st_size)
        problem = complaint.decode(errors="replace").rstrip() or "the process that wrote it was killed"
        if abandoned:
            problem = "the run ended before it was complete"
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        return no_core_notice(self.pid, self.name, self.path, problem)


def start_dump(
    pid: int, tid: int, name: str, directory: str, hidden: dict[int, int], stops: CoreStops
) -> Dump | Notice:
    """
    Start the core dump of a stopped process after a hit of its thread ``tid``.

    ``hidden`` has the original bytes under breakpoints, by address. If no file can be created in ``directory``, resume
    the process and return the notice.
    """
    import json

    from dprobes.engines.engine_interface import no_core_notice
    from dprobes.platform.core.core_writer import create_core_file

    path = os.path.join(directory, f"core.dprobes.{pid}")
    try:
        path, output = create_core_file(path)
    except OSError as error:
        stops.let_go_on(pid)
        return no_core_notice(pid, name, path, reason_of(error))
    import subprocess

    list_ = stops.descriptor
    try:
        writer = subprocess.Popen(
            [sys.executable, "-P", "-m", "dprobes.engines.ebpf.read.core_dumper", str(pid), str(tid), str(list_)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.PIPE,
            pass_fds=(list_,),
            start_new_session=True,
        )
    finally:
        os.close(output)
    stops.entrust(pid, writer.pid)  # before the writer can have begun
    assert writer.stdin is not None
    with contextlib.suppress(BrokenPipeError), writer.stdin:
        writer.stdin.write(json.dumps(hidden).encode())
    writer.stdin = None
    return Dump(pid, name, path, writer, stops)


def breakpoints_in(pid: int, sites: Mapping[tuple[int, int], Iterable[tuple[int, int]]]) -> dict[int, int]:
    """
    Return the original bytes under the breakpoints in a process, keyed by address.

    ``sites`` are pairs of a file offset and the original byte, keyed by the file's device and inode number.
    """
    found: dict[int, int] = {}
    for mapping in code_mappings(pid)[0]:
        for offset, byte in sites.get((mapping.device, mapping.inode), ()):
            address = mapping.start + offset - mapping.offset
            if mapping.start <= address < mapping.end:
                found[address] = byte
    return found


def main(pid: int, tid: int, stops: CoreStops) -> None:
    """Write the core dump of a stopped process to standard output, and resume the process."""
    was_stopped = False
    try:
        was_stopped = await_stop(pid)
        _write(pid, tid)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(os.readlink(f"/proc/self/fd/{sys.stdout.fileno()}"))
        raise
    finally:
        # The writer does this, in case dprobes is killed. The process continues when the writer has exited.
        stops.let_go_on(pid, was_stopped=was_stopped)


def _write(pid: int, tid: int) -> None:
    import json

    from dprobes.platform.core.core_file import PROCESSORS, signal_info_at
    from dprobes.platform.core.core_writer import POINTER, CoreRequest, HeldThread, register_sets_of, write_core
    from dprobes.platform.linux import ptrace_calls
    from dprobes.platform.linux.ptrace_calls import RegisterSet

    hidden = {int(address): byte for address, byte in json.load(sys.stdin).items()}
    seized: set[int] = set()
    while new := _threads(pid) - seized:
        for each in sorted(new):
            with contextlib.suppress(ProcessLookupError):
                ptrace_calls.seize(each)
                ptrace_calls.interrupt(each)
                os.waitpid(each, ptrace_calls.WALL)
            seized.add(each)
    general = {
        each: ptrace_calls.get_register_set(each, RegisterSet.GENERAL) for each in (tid, *sorted(seized - {tid}))
    }
    # PTRACE_GETREGSET returns 17 registers of 4 bytes for a 32-bit process, or 27 of 8 bytes.
    word_size: Literal[4, 8] = 4 if len(general[tid]) == _I386_REGISTERS_SIZE else 8
    threads = [HeldThread(each, registers, register_sets_of(each, word_size)) for each, registers in general.items()]
    offset, word = POINTER[word_size]
    (address,) = struct.unpack_from(word, general[tid], offset)
    memory = os.open(f"/proc/{tid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    processor = PROCESSORS["x86_64" if word_size == 8 else "i386"]
    request = CoreRequest(pid, processor, tuple(threads), signal_info_at(processor, address))
    write_core(request, memory, hidden, sys.stdout.fileno())


def _threads(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/task")}


if __name__ == "__main__":
    try:
        with CoreStops(int(sys.argv[3])) as list_of_stops:
            main(int(sys.argv[1]), int(sys.argv[2]), list_of_stops)
    except OSError as error:
        sys.stderr.write(reason_of(error))
        sys.exit(1)
    except ValueError:
        sys.exit("dprobes ended before it had named the memory to write")

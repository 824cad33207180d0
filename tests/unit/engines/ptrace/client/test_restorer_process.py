"""The process restores what a killed tracer has told it of, and nothing when the tracer ends in peace."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

import pytest

from dprobes.engines.ptrace.client.left_removal import Restored
from dprobes.engines.ptrace.client.restorer_process import RestorerProcess
from dprobes.platform.linux.procfs import process_field

TRACER = """
import os, signal, sys
from dprobes.engines.ptrace.restorer_messages import TracerBegun
from dprobes.engines.ptrace.tracer_messages import Placed
from dprobes.engines.ptrace.tracer_messages import pack_message
pipe, target, address, ends = map(int, sys.argv[1:])
os.write(pipe, pack_message(TracerBegun(os.getpid())))
os.write(pipe, pack_message(Placed(target, ((address, 0x55),))))
print("told", flush=True)
if ends:
    sys.stdin.read(1)
    sys.exit(0)
signal.pause()
"""
INT3 = 0xCC


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_tracer_leaves_is_restored_if_it_is_killed(ends: bool) -> None:
    code = (ctypes.c_ubyte * 8)(INT3)
    restorer = RestorerProcess()
    pipe, _ = restorer.address
    tracer = subprocess.Popen(
        [sys.executable, "-c", TRACER, str(pipe), str(os.getpid()), str(ctypes.addressof(code)), str(int(ends))],
        pass_fds=[pipe],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert tracer.stdin is not None
    assert tracer.stdout is not None
    restorer.begun()
    assert tracer.stdout.readline() == b"told\n"
    restorer.await_watch()
    assert process_field(tracer.pid, "TracerPid") == str(restorer.address[1])
    if ends:
        tracer.stdin.write(b"x")
    else:
        tracer.send_signal(signal.SIGKILL)
    tracer.stdin.close()
    found = restorer.result()
    tracer.wait()
    restorer.close()
    tracer.stdout.close()
    assert found == (Restored() if ends else Restored(places=1))
    assert code[0] == (INT3 if ends else 0x55)


def test_it_ends_if_no_tracer_ever_comes() -> None:
    restorer = RestorerProcess()
    restorer.begun()
    assert restorer.result() == Restored()
    restorer.close()

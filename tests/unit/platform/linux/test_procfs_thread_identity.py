"""What a thread is called and whose it is can be read as long as nobody has waited for it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from dprobes.platform.linux.procfs import ThreadIdentity, identity_of, program_of

NOBODY = 4_194_304


def test_a_thread_has_the_name_that_it_has_given_itself() -> None:
    found: list[ThreadIdentity | None] = []

    def look() -> None:
        Path("/proc/thread-self/comm").write_text("odd\tname")
        found.append(identity_of(os.getpid(), threading.get_native_id()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    (identity,) = found
    assert identity is not None
    assert (identity.pid, identity.name, identity.uid) == (os.getpid(), b"odd\tname", os.getuid())
    assert identity.program is None


def test_a_process_that_has_ended_has_its_name_until_somebody_waits() -> None:
    child = os.fork()
    if not child:
        Path("/proc/self/comm").write_text("ended")
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    identity = identity_of(child, child)
    os.waitpid(child, 0)
    assert identity == ThreadIdentity(child, child, b"ended", os.getuid())
    assert identity_of(child, child) is None


def test_the_program_is_the_file_that_a_process_executes() -> None:
    status = Path("/proc/self/exe").stat()
    assert program_of(os.getpid()) == (status.st_dev, status.st_ino)
    assert program_of(NOBODY) is None

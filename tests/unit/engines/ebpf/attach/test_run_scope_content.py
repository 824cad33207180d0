from __future__ import annotations

import os
import subprocess
import sys

from dprobes.engines.ebpf.attach.run_scope import KEY, descendants, plant, put

NOBODY = 0x7FFF_FFF1


class Scope(dict[bytes, bytes]):
    """A scope that is only here."""

    def discard(self, key: bytes) -> bool:
        return self.pop(key, None) is not None


def pids(scope: Scope) -> set[int]:
    return {KEY.unpack(key)[0] for key in scope}


def test_a_process_and_what_it_has_started_are_in_scope() -> None:
    script = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('there', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (child,) = descendants(parent.pid)
        alive: list[int] = []
        scope, alone = Scope(), Scope()
        assert plant(scope, alive.append, parent.pid, follow=True) == 0
        assert plant(alone, alive.append, parent.pid, follow=False) == 0
        os.kill(child, 9)
        parent.communicate("")
    assert pids(scope) == {parent.pid, child}
    assert pids(alone) == {parent.pid}
    assert alive == [2, 1]


def test_one_that_has_ended_is_not_in_scope_and_does_not_count() -> None:
    scope = Scope()
    assert plant(scope, lambda _: None, NOBODY, follow=True) == -1
    assert not scope


def test_a_process_may_have_another_number() -> None:
    scope = Scope()
    assert put(scope, os.getpid(), 5) == 0
    assert pids(scope) == {5}

"""Images of processes are those that the kernel tells of."""

from __future__ import annotations

import os
import subprocess

import pytest

from dprobes.engines.ebpf.read.image_watch import ImageWatch
from dprobes.engines.engine_interface import Scope
from dprobes.target.process_images import ProcessImages


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_what_a_program_had_mapped_is_known_when_it_has_ended() -> None:
    images = ProcessImages()
    watch = ImageWatch(images, Scope(pid=os.getpid()), os.getpid())
    with subprocess.Popen(["/bin/true"]) as child:
        child.wait()
    watch.look()
    for pid in (os.getpid(), child.pid):
        image = images.at(pid, None)
        assert image is not None
        assert any("libc.so" in each.path for each in image.mappings)
    watch.close()
    watch.look()


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_of_a_tree_no_other_process_is_told_of() -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as root:
        images = ProcessImages()
        watch = ImageWatch(images, Scope(pid=root.pid), root.pid)
        with subprocess.Popen(["/bin/true"]) as outsider:
            outsider.wait()
        watch.look()
        assert images.at(root.pid, None) is not None
        assert images.at(outsider.pid, None) is None
        watch.close()


def test_without_the_right_nothing_is_told_and_all_else_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise PermissionError

    monkeypatch.setattr("dprobes.engines.ebpf.read.image_watch.open_process_news", refuse)
    images = ProcessImages()
    watch = ImageWatch(images, Scope(pid=os.getpid()), os.getpid())
    watch.look()
    assert images.at(os.getpid(), None) is not None
    watch.close()

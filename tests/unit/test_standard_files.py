"""Files that wait for their reader until the process is to end."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from dprobes.cli.main import run
from dprobes.standard_files import EndingSignals, WaitingFile, give_up, own_standard_files, settle, waiting_file_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def ending() -> Iterator[EndingSignals]:
    before, wakeup = signal.signal(signal.SIGINT, lambda *_: None), signal.set_wakeup_fd(-1)
    yield EndingSignals()
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


BIG = b"x" * (1 << 20)
"""More than a pipe takes."""


def test_what_finds_no_room_is_held_when_the_process_is_to_end(pipe: tuple[int, int], ending: EndingSignals) -> None:
    file = WaitingFile(pipe[1], "pipe", ending)
    signal.raise_signal(signal.SIGINT)
    assert file.write(BIG) == len(BIG)
    assert file.is_holding
    given = file.written
    assert 0 < given < len(BIG)
    assert len(os.read(pipe[0], 1 << 20)) == given
    assert file.write(b"more") == 4
    assert file.written > given
    assert not file.settle(0)
    assert (file.is_holding, file.has_lost) == (False, True)
    assert file.write(b"nothing") == 7


def test_a_reader_who_takes_something_is_waited_for(pipe: tuple[int, int], ending: EndingSignals) -> None:
    file = WaitingFile(pipe[1], "pipe", ending)
    signal.raise_signal(signal.SIGINT)
    file.write(BIG)
    child = os.fork()
    if child == 0:
        os.close(pipe[1])
        file.close()
        left = len(BIG)
        while left and (data := os.read(pipe[0], left)):
            left -= len(data)
        os._exit(bool(left))
    assert file.settle(3600)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (file.written, file.has_lost) == (len(BIG), False)


def test_other_signals_end_no_wait(ending: EndingSignals) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.raise_signal(signal.SIGUSR1)
    assert not ending.have_come
    signal.raise_signal(signal.SIGINT)
    assert ending.have_come
    signal.signal(signal.SIGUSR1, before)


def test_who_gives_up_says_so(pipe: tuple[int, int], ending: EndingSignals) -> None:
    file = WaitingFile(pipe[1], "pipe", ending)
    assert not file.end_wait()
    signal.raise_signal(signal.SIGINT)
    file.write(BIG)
    assert file.end_wait()
    assert file.problem == "its reader did not read in time"


def test_others_do_not_share_that_a_pipe_does_not_wait(pipe: tuple[int, int], ending: EndingSignals) -> None:
    WaitingFile(pipe[1], "pipe", ending)
    assert os.get_blocking(pipe[1])


def test_a_pipe_that_nobody_can_read_is_an_error(ending: EndingSignals) -> None:
    reader, writer = os.pipe()
    file = WaitingFile(writer, "pipe", ending, is_owned=True)
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        file.write(b"x")
    file.close()


def test_a_process_of_ours_writes_through_a_buffer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without one, with PYTHONUNBUFFERED, Python would forget what a write leaves over."""
    file = io.TextIOWrapper((tmp_path / "out").open("wb", buffering=0), "utf-8", write_through=True)
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "stderr", text)
    own_standard_files()
    assert isinstance(sys.stdout.buffer, io.BufferedWriter)
    assert sys.stderr is text
    print("a line")
    assert (tmp_path / "out").read_text() == "a line\n"
    assert settle(is_patient=True) == []
    assert waiting_file_of(sys.stdout) is not None
    give_up(sys.stdout)
    print("nobody reads it")
    assert settle(is_patient=True) == []
    assert (tmp_path / "out").read_text() == "a line\n"
    sys.stdout.close()
    assert settle(is_patient=True) == []
    file.close()


def test_the_caller_of_a_command_keeps_its_standard_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = io.TextIOWrapper((tmp_path / "out").open("wb", buffering=0), "utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", file)
    assert run(["--version"]) == 0
    assert sys.stdout is file
    monkeypatch.undo()
    gc.collect()
    assert file.write("and more\n") == 9
    file.close()
    assert (tmp_path / "out").read_text().endswith("\nand more\n")

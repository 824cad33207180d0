"""What the kernel says of CPUs, and which there are."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from dprobes.platform.linux.procfs import CpuNews, cpu_limit, online_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator


class Messages:
    """Stand for the kernel's socket."""

    def __init__(self, *messages: bytes | int) -> None:
        self.messages: Iterator[bytes | int] = iter(messages)
        self.address: tuple[int, int] | None = None

    def __call__(self, *_: int) -> Messages:
        return self

    def bind(self, address: tuple[int, int]) -> None:
        self.address = address

    def recv(self, _: int) -> bytes:
        match next(self.messages, errno.EAGAIN):
            case int(number):
                raise OSError(number, os.strerror(number))
            case message:
                return message


def online(place: str) -> bytes:
    return f"online@{place}\0ACTION=online\0DEVPATH={place}\0SUBSYSTEM=cpu\0SEQNUM=7\0".encode()


def news(monkeypatch: pytest.MonkeyPatch, *messages: bytes | int) -> CpuNews:
    monkeypatch.setattr("socket.socket", Messages(*messages))
    return CpuNews()


def test_the_cpus_are_those_of_this_process_at_least() -> None:
    assert os.sched_getaffinity(0) <= set(online_cpus())
    assert max(online_cpus()) < cpu_limit()


def test_a_cpu_that_comes_online_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = news(monkeypatch, online("/devices/system/cpu/cpu12"), online("/devices/system/cpu/cpu3"))
    assert heard.arrived() == [3, 12]
    assert heard.arrived() == []


@pytest.mark.parametrize(
    "message",
    [
        online("/devices/system/memory/memory32"),
        online("/devices/system/cpu/cpufreq"),
        online("/devices/system/cpu/cpu1").replace(b"online", b"offline"),
        online("/devices/system/cpu/cpu1").replace(b"online@", b"add@"),
        b"",
    ],
)
def test_other_news_is_of_no_cpu(monkeypatch: pytest.MonkeyPatch, message: bytes) -> None:
    assert news(monkeypatch, message).arrived() == []


def test_where_news_was_lost_every_cpu_may_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    assert news(monkeypatch, errno.ENOBUFS).arrived() == online_cpus()


def test_a_socket_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="Input/output error"):
        news(monkeypatch, errno.EIO).arrived()


def test_the_kernel_is_listened_to() -> None:
    heard = CpuNews()
    assert os.fstat(heard.descriptor)
    assert heard.arrived() == []
    heard.close()

"""Why a system call failed: the words for it in messages, and the exceptions that carry them."""

from __future__ import annotations

import errno

import pytest

from dprobes.errors import reason_of, reason_of_number, system_error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOENT, "No such file or directory", "/Some/FILE"), "no such file or directory"),
        (OSError(errno.EPERM, "bpf PROG_LOAD: Operation not permitted"), "bpf prog_load: operation not permitted"),
        (OSError("Nothing has a number"), "nothing has a number"),
        (ValueError("Embedded null byte"), "embedded null byte"),
    ],
)
def test_a_reason_is_the_words_of_the_error_as_part_of_a_message(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_an_error_number_has_the_words_of_its_exception() -> None:
    assert reason_of_number(errno.ESRCH) == reason_of(system_error(errno.ESRCH)) == "no such process"


def test_a_number_makes_the_exception_that_python_raises_for_it() -> None:
    error = system_error(errno.ESRCH)
    assert type(error) is ProcessLookupError
    assert error.args == (errno.ESRCH, "No such process")


def test_an_exception_may_name_its_system_call() -> None:
    assert system_error(errno.EPERM, "bpf PROG_LOAD").args == (errno.EPERM, "bpf PROG_LOAD: Operation not permitted")

"""An outlet that fails says exactly what of what was not flushed is there, and leaves whole records behind."""

from __future__ import annotations

import contextlib
import resource
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import SinkError
from dprobes.sinks.local import console_target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


LIMIT = 100


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Let no file become larger than LIMIT; not longer than needed, as pytest's own output may be a file."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_file_that_is_full_ends_behind_a_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "out"
    outlet = console_target.file(path)
    outlet.write(["ä" * 9, "b" * 19])  # 19 and 20 bytes
    outlet.flush()
    outlet.write(["c" * 19])
    outlet.write(["d" * 19, "e" * 29, "f" * 19])
    with limited(), pytest.raises(SinkError) as caught:
        outlet.flush()
    assert caught.value.message == f"'{path}': file too large"
    assert (caught.value.taken, caught.value.lost) == (0, 2)
    outlet.write(["g"])
    outlet.close()
    assert path.read_text() == "".join(f"{text}\n" for text in ("ä" * 9, "b" * 19, "c" * 19, "d" * 19))
    assert path.stat().st_size <= LIMIT


def test_what_a_write_that_fails_has_taken_is_told(tmp_path: Path) -> None:
    outlet = console_target.file(tmp_path / "out")
    outlet.write(["a" * 19])
    with limited(), pytest.raises(SinkError) as caught:
        outlet.write(["b" * 19, "c" * 9999])
    # What is written is written in whole, however it is kept before.
    assert (caught.value.taken, caught.value.lost) == (1, 0)
    assert (tmp_path / "out").read_text() == "a" * 19 + "\n" + "b" * 19 + "\n"
    outlet.close()


def test_an_outlet_that_nobody_flushes_keeps_few_records(tmp_path: Path) -> None:
    path = tmp_path / "out"
    outlet = console_target.file(path)
    for number in range(300):
        outlet.write([f"{number} {each}" for each in range(100)])
        assert sum(map(len, outlet._unflushed)) <= 10_000
    outlet.close()
    assert len(path.read_text().splitlines()) == 30_000

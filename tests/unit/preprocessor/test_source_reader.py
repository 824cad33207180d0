"""Reading source files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dprobes.errors import SourceError
from dprobes.preprocessor import FILE_LIMIT, read_source


def test_a_file_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "x.rpn"
    path.write_bytes("push 1 // é\r\n".encode())
    source = read_source(path)
    assert (str(path), "push 1 // é\r\n") == (source.name, source.text)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x7fELF\0", "error: 'x.rpn' is not a text file\nnote: NUL at byte 4"),
        (b"push \xff", "error: 'x.rpn' is not a text file\nnote: invalid UTF-8 at byte 5"),
        (b"a" * (FILE_LIMIT + 1), "error: 'x.rpn' is larger than 16 MiB"),
        (None, "error: cannot read 'x.rpn': no such file or directory"),
    ],
    ids=["nul", "utf-8", "large", "missing"],
)
def test_a_file_that_cannot_be_used_raises_a_source_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes | None, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if data is not None:
        Path("x.rpn").write_bytes(data)
    with pytest.raises(SourceError) as caught:
        read_source(Path("x.rpn"))
    assert expected == str(caught.value)


def test_a_directory_is_not_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    with pytest.raises(SourceError) as caught:
        read_source(Path("d"))
    assert str(caught.value) == "error: cannot read 'd': is a directory"

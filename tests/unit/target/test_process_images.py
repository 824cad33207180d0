"""What processes had mapped: at each moment what they executed then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from dprobes.target import process_images as module
from dprobes.target.process_images import ProcessImage, ProcessImages
from dprobes.target.process_maps import Mapping

if TYPE_CHECKING:
    import pytest


def mapping(start: int, end: int, path: str = "/lib/a.so") -> Mapping:
    return Mapping(start, end, "r-xp", 0, 1, 2, path, deleted=False)


def paths(images: ProcessImages, pid: int, when: int | None, address: int) -> str | None:
    image = images.at(pid, when)
    found = image.covering(address) if image is not None else None
    return None if found is None else found.path


def test_what_compilers_map_does_not_displace_the_files_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAPPINGS_MAX", 3)
    compiled = [mapping(n << 12, n + 1 << 12, "/memfd:doublemapper") for n in range(1, 9)]
    image = ProcessImage(1, 0, [*compiled, mapping(0x100000, 0x101000)])
    assert [each.start for each in image.mappings] == [0x1000, 0x2000, 0x100000]


def test_a_process_has_what_it_executed_at_the_moment() -> None:
    images = ProcessImages()
    images.began(1, 100)
    images.mapped(1, 101, mapping(0x1000, 0x2000))
    images.began(1, 200, [mapping(0x1000, 0x3000, "/bin/b")])
    images.mapped(1, 150, mapping(0x5000, 0x6000))  # news that comes late
    assert [paths(images, 1, when, 0x1800) for when in (99, 100, 199, 200, None)] == [
        None, "/lib/a.so", "/lib/a.so", "/bin/b", "/bin/b",
    ]  # fmt: skip
    assert paths(images, 1, 150, 0x5000) == "/lib/a.so"
    assert paths(images, 1, 200, 0x5000) is None
    assert images.at(2, None) is None
    found = images.covering(1, 0x5000)
    assert found is not None
    assert found.since == 100
    assert images.covering(1, 0x9000) is None


def test_a_forked_child_begins_with_a_copy() -> None:
    images = ProcessImages()
    images.began(1, 100, [mapping(0x1000, 0x2000)])
    images.forked(7, 1, 150)
    images.mapped(1, 160, mapping(0x3000, 0x4000))
    images.mapped(7, 170, mapping(0x5000, 0x6000))
    images.forked(8, 9, 150)  # of a process of which nobody has told
    assert paths(images, 7, 150, 0x1000) == "/lib/a.so"
    assert paths(images, 7, None, 0x3000) is None
    assert paths(images, 1, None, 0x5000) is None
    assert images.at(8, None) is None


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15)), max_size=12))
def test_a_mapping_takes_the_place_of_those_that_it_lies_over(found: list[tuple[int, int]]) -> None:
    image = ProcessImage(1, 0)
    expected: dict[int, Mapping] = {}
    for number, (start, size) in enumerate(found):
        new = mapping(start, start + size, f"/{number}")
        expected = {at: each for at, each in expected.items() if each.end <= new.start or each.start >= new.end}
        expected |= dict.fromkeys(range(new.start, new.end), new)
        image.add(new)
    assert [image.covering(at) for at in range(60)] == [expected.get(at) for at in range(60)]
    assert image.mappings == sorted(set(expected.values()))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROCESSES_MAX", 3)
    monkeypatch.setattr(module, "_IMAGES_MAX", 2)
    monkeypatch.setattr(module, "_MAPPINGS_MAX", 4)
    images = ProcessImages()
    for pid in range(5):
        for when in range(5):
            images.began(pid, when)
    assert [images.at(pid, None) is not None for pid in range(5)] == [False, False, True, True, True]
    assert [images.at(4, when) is not None for when in range(5)] == [False, False, False, True, True]
    image = ProcessImage(1, 0, [mapping(16 * n, 16 * n + 16) for n in range(9)])
    image.add(mapping(1600, 1616))
    assert len(image.mappings) == 4


def test_different_code_at_an_address_is_told_of_once_each() -> None:
    images = ProcessImages()
    images.began(1, 100, [mapping(0x1000, 0x3000)])
    images.forked(2, 1, 150)
    assert images.code_at(0x1800) == [(2, 150)]
    other = Mapping(0x1000, 0x2000, "r-xp", 0, 1, 3, "/lib/a.so", deleted=False)
    images.began(3, 200, [other])
    assert sorted(images.code_at(0x1800)) == [(2, 150), (3, 200)]
    assert images.code_at(0x2800) == [(2, 150)]
    assert images.code_at(0x3000) == []
    images.mapped(3, 250, mapping(0x3000, 0x4000))
    assert images.code_at(0x3000) == [(3, 200)]

"""Places in code by the addresses at which processes map it."""

from __future__ import annotations

from dprobes.cli.runs.code_places import CodePlaces
from dprobes.target.process_images import ProcessImages
from dprobes.target.process_maps import Mapping

OURS, OTHER = 11, 12
PLACES = {0x10: "outer", 0x20: "inner"}


def mapping(start: int, inode: int) -> Mapping:
    return Mapping(start, start + 0x1000, "r-xp", 0, 1, inode, "/lib/x.so", deleted=False)


def test_addresses_are_those_of_places_only_where_the_module_is_mapped() -> None:
    images = ProcessImages()
    images.began(1, 1, [mapping(0x5000, OTHER)])
    images.began(2, 1, [mapping(0x5000, OURS)])
    images.began(3, 1, [mapping(0x9000, OTHER)])
    places = CodePlaces(images, PLACES, OURS)
    assert [places.at(address) for address in (0x5010, 0x5020, 0x5030, 0x9010)] == ["outer", "inner", None, None]


def test_without_images_no_place_is_known() -> None:
    assert CodePlaces(None, PLACES, OURS).at(0x5010) is None

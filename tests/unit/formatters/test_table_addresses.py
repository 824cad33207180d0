"""Names of addresses in tables that do not say of which process they are."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from dprobes.formatters.address_names import AddressSymboliser
from dprobes.formatters.table_addresses import ProcessAddresses
from dprobes.record.record_origin import RecordSource
from dprobes.target.process_images import ProcessImages
from dprobes.target.process_maps import Mapping, executable_mappings, read_maps

if TYPE_CHECKING:
    from pathlib import Path

GONE = 1 << 30
"""Ids that no process has."""


def test_an_address_where_processes_have_different_code_has_no_name(tmp_path: Path) -> None:
    address = ctypes.cast(ctypes.CDLL("libc.so.6").getpid, ctypes.c_void_p).value
    assert address is not None
    mappings = executable_mappings(read_maps(os.getpid()))
    images = ProcessImages()
    names = ProcessAddresses(AddressSymboliser(RecordSource(1, "a", images=images), live=True), images)
    assert names.name_of(address, None) is None
    images.began(GONE, 100, mappings)
    images.forked(GONE + 1, GONE, 200)
    name = names.name_of(address, None)
    assert name is not None
    assert name.endswith("getpid [libc.so.6]")
    (tmp_path / "other").write_bytes(b"")
    status = (tmp_path / "other").stat()
    page = address & -4096
    place = (page, page + 4096, "r-xp", 0, status.st_dev, status.st_ino, str(tmp_path / "other"))
    images.began(GONE + 2, 300, [Mapping(*place, deleted=False)])
    assert names.name_of(address, None) is None
    assert names.name_of(address, GONE) == name
    assert names.name_of(address, GONE + 2) == f"other+{address - page:#x}"

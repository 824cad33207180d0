"""The instrumentation set vfs, whose probes are functions of the kernel."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from guests.guest import Guest

pytestmark = [pytest.mark.shared_guest, pytest.mark.each_kernel]

SCRIPT = "echo 12345 > /tmp/made; cat /tmp/made; cat /tmp/made > /dev/full; rm /tmp/made"


def test_files_are_opened_read_written_and_removed(guest: Guest) -> None:
    done = guest.dprobes("run", "vfs", "--format", "json", "--", "sh", "-c", SCRIPT)
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {record["major"] for record in records} == {336}
    found = [(record["minor"], record["fields"]) for record in records]
    opened = [fields["name"] for minor, fields in found if minor == 1]
    assert (opened.count("made"), opened.count("full")) == (3, 1)
    read = [fields["result"] for minor, fields in found if minor == 2 and fields["name"] == "made"]
    assert [result for result in read if result] == [6, 6]
    written = [(fields["name"], fields["result"]) for minor, fields in found if minor == 3]
    assert ("made", 6) in written
    assert ("full", -28) in written  # ENOSPC
    assert [fields["name"] for minor, fields in found if minor == 4] == ["made"]
    assert all(0 <= fields["elapsed"] < 60 * 10**9 for minor, fields in found if minor in (2, 3))

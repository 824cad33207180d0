"""What the client answers about files, and how it finds the file that a process has mapped."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ptrace.breakpoint_sites import Role, Sites
from dprobes.engines.ptrace.client.site_answers import Answers, reachable
from dprobes.engines.ptrace.tracer_messages import ModuleMapped
from dprobes.errors import TargetError
from dprobes.platform.foreign.examiner import Examiner
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile
from dprobes.target.process_maps import executable_mappings, read_maps

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.platform.foreign.foreign_outlines import Examined, Question


@pytest.fixture
def mapped() -> ModuleMapped:
    """Return the question about the C library of this process, as the tracer would ask it."""
    library = next(m for m in executable_mappings(read_maps(os.getpid())) if "/libc.so" in m.path)
    return ModuleMapped(1, os.getpid(), library.path, library.device, library.inode)


def test_the_mapped_file_is_found_by_its_path(mapped: ModuleMapped) -> None:
    assert reachable(mapped) == Path(mapped.path)


def test_a_file_with_the_inode_of_the_mapped_one_on_another_device_is_not_taken_for_it(mapped: ModuleMapped) -> None:
    with pytest.raises(
        TargetError, match=rf"^MISMATCH: '{mapped.path}' was replaced or removed while process {mapped.pid} uses it$"
    ):
        reachable(mapped._replace(device=mapped.device + 1))


def test_the_same_file_by_another_path_has_the_same_probepoints(mapped: ModuleMapped) -> None:
    text = 'name = "libc.so.6"\noffset = malloc\nexit\noffset = free\nexit\n'
    program = parse_source(SourceFile("<test>", text), Diagnostics())
    answers = Answers(program, allow_write=False)
    sites, notices = answers.sites(mapped)
    assert [(site.probe, site.definition) for site in sites.sites] == [(0, 0), (1, 1)]
    assert answers.sites(mapped._replace(path=f"/proc/self/root{mapped.path}")) == (sites, [])
    assert notices == []
    assert [probe.where for probe in answers.probes] == ["malloc", "free"]


def test_a_file_that_everybody_can_change_is_read_by_another_process(
    mapped: ModuleMapped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copy(mapped.path, tmp_path / "libc.so.6"))
    status = copy.stat()
    mapped = mapped._replace(path=str(copy), device=status.st_dev, inode=status.st_ino)
    text = 'name = "libc.so.6"\noffset = malloc\nexit\noffset = free\nreturn = yes\nexit\n'
    program = parse_source(SourceFile("<test>", text), Diagnostics())
    expected, _ = Answers(program, allow_write=False).sites(mapped)
    assert {site.role for site in expected.sites} >= {Role.PROBE, Role.UNWINDING}

    modes = []
    examine = Examiner.examine

    def noting(self: Examiner, question: Question, descriptor: int, is_wanted: Callable[[], bool]) -> Examined | None:
        modes.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH)
        return examine(self, question, descriptor, is_wanted)

    monkeypatch.setattr(Examiner, "examine", noting)
    copy.chmod(0o666)
    answers = Answers(program, allow_write=False)
    try:
        found, notices = answers.sites(mapped)
    finally:
        answers.close()
    assert set(found.sites) == set(expected.sites)
    assert found._replace(sites=expected.sites) == expected
    assert notices == []
    assert modes == [os.O_PATH]  # it cannot be read by this process


def test_addresses_of_every_process_are_the_same_probepoints_for_both_processors() -> None:
    text = "name = vmlinux\nmodtype = kernel\naddress = 0x1000:0x1002\nwatchpoint = rw\nexit\n"
    text += "address = 0x1000:0x1003\nwatchpoint = w\nexit\n"
    program = parse_source(SourceFile("<test>", text), Diagnostics())
    answers = Answers(program, allow_write=False)
    everywhere = answers.everywhere()
    assert [probe.state for probe in answers.probes] == [ProbeState.WATCHPOINT_LEN_INVALID, ProbeState.COMPILED]
    for word_size in (4, 8):
        sites = everywhere[word_size]
        assert isinstance(sites, Sites)
        assert [(site.probe, site.definition, site.watch.address) for site in sites.watches] == [(1, 1, 0x1000)]
        assert sites.code is not None
        assert sites.code.image.word_size == word_size


def test_no_file_is_the_module_of_a_program_for_the_kernel(mapped: ModuleMapped) -> None:
    text = 'name = "libc.so.6"\nmodtype = kernel\naddress = 0x1000\nwatchpoint = w\nexit\n'
    program = parse_source(SourceFile("<test>", text), Diagnostics())
    assert Answers(program, allow_write=False).sites(mapped) == (Sites(), [])

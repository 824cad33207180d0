"""The files of a module are found in containers too, and each once."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.attach.code_mappers import file_id, find_mappers
from dprobes.engines.ebpf.attach.file_spec import ModuleFile, descriptor_path, module_files
from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.module_lookup import find_module
from dprobes.target.probed_module import Module
from dprobes.target.process_maps import run_time_address
from integration.ebpf.kernel import uprobes, waiting

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from integration.support import Builder

LIBC = "libc.so.6"


@pytest.fixture(autouse=True)
def _root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: mount namespaces are made")


@contextlib.contextmanager
def running(*command: str | Path) -> Iterator[int]:
    with waiting(*command, skip="no mount namespace can be made here") as process:
        yield process.pid


def make_root(directory: Path, program: Path) -> Path:
    """Copy the program to ``directory``, with all that it needs to start there."""
    directory.mkdir()
    (directory / "prog").write_bytes(program.read_bytes())
    (directory / "prog").chmod(0o755)
    elf = ElfFile.open(program)
    assert elf.interpreter is not None
    for file in (Path(elf.interpreter), Path("/lib/x86_64-linux-gnu", LIBC)):
        copy = directory / file.relative_to("/")
        copy.parent.mkdir(parents=True)
        shutil.copy(file, copy)
    return directory


def look(name: str, known: Iterable[Path] = (), pids: Iterable[int] | None = None) -> list[ModuleFile]:
    found = module_files(name, known, pids)
    for file in found:
        for descriptor in file.descriptors:
            os.close(descriptor)
    return found


def named(name: str, pids: list[int]) -> list[ModuleFile]:
    found = find_module(name)
    return look(name, [found] if found is not None else [], pids)


@pytest.mark.parametrize("way", ["pivot", "chroot"])
def test_the_library_of_a_container_is_a_file_of_its_own(build: Builder, tmp_path: Path, way: str) -> None:
    root = make_root(tmp_path / "root", build("patched.c"))
    with running(build("container.c"), way, root, "/prog") as pid:
        ours, theirs = named(LIBC, [os.getpid(), pid])
        assert ours.identity == file_id(f"/lib/x86_64-linux-gnu/{LIBC}")
        assert theirs.identity == file_id(root / "lib/x86_64-linux-gnu" / LIBC)
        assert theirs.path.parts[:3] == ("/", "proc", str(pid))
        assert Module.load(theirs.path).address_of("malloc") > 0
        assert [mapper.pid for mapper in find_mappers(theirs.path)] == [pid]
        # Of all processes it is found as well.
        assert theirs.identity in [file.identity for file in look(LIBC)]


@pytest.mark.parametrize("way", ["pivot", "chroot"])
def test_a_path_is_what_it_is_in_each_process(build: Builder, tmp_path: Path, way: str) -> None:
    root = make_root(tmp_path / "root", build("patched.c"))
    (root / "link").symlink_to("prog")
    with running(build("container.c"), way, root, "/prog") as pid:
        for name in ("/prog", "/link"):
            (found,) = named(name, [pid])
            assert found.identity == file_id(root / "prog")
        assert look("/prog", [], [os.getpid()]) == []
        assert look("./prog", [], [pid]) == []


def test_processes_of_one_file_give_one_file(build: Builder) -> None:
    program = build("patched.c")
    with running(program) as first, running(program) as second:
        expected = [ModuleFile(program, file_id(program), -1)]
        assert look(program.name, [], [first, second]) == expected
        assert look(str(program), [program], [first, second]) == expected


def test_a_file_stays_reached_when_the_process_has_ended(build: Builder, tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", build("patched.c"))
    with running(build("container.c"), "pivot", root, "/prog") as pid:
        (found,) = module_files("/prog", [], [pid])
    with Descriptors([found.descriptor]):
        assert not found.path.exists()
        assert Module.load(found.path, reached=found.reached).address_of("first") > 0


def test_a_file_that_was_replaced_is_found_where_it_is_still_executed(build: Builder, tmp_path: Path) -> None:
    program = tmp_path / "patched"
    shutil.copy(build("patched.c"), program)
    with running(program) as pid:
        old = file_id(program)
        program.unlink()
        shutil.copy(build("patched.c"), program)
        new, kept = look(str(program), [program], [pid])
        assert new.identity == file_id(program)
        assert kept.identity == old
        assert kept.path.parent == Path(f"/proc/{pid}/map_files")
        assert Module.load(kept.path).address_of("first") > 0


def test_a_library_is_found_by_its_soname(tools_library: Path) -> None:
    with running("python3", "-c", LOADER, tools_library) as pid:
        (found,) = look("libnamed.so.7", [], [pid])
        assert found.path == tools_library
        assert look("libnamed.so.8", [], [pid]) == []
        (found,) = look("libnamed-1.0.so", [], [pid])
        assert found.path == tools_library


LOADER = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def tools_library(tmp_path: Path) -> Path:
    source = tmp_path / "named.c"
    source.write_text("int named(void) { return 1; }\n")
    path = tmp_path / "libnamed-1.0.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libnamed.so.7", "-o", path, source], check=True)
    return path


@contextlib.contextmanager
def overlays(lower: Path, directory: Path) -> Iterator[list[Path]]:
    """Mount two overlay file systems over one directory, as for two containers of an image."""
    points = []
    try:
        for n in range(2):
            for part in ("upper", "work", "merged"):
                (directory / f"{part}{n}").mkdir()
            options = f"lowerdir={lower},upperdir={directory}/upper{n},workdir={directory}/work{n}"
            point = directory / f"merged{n}"
            done = subprocess.run(
                ["mount", "-t", "overlay", "overlay", "-o", options, point], capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(f"no overlay file system can be mounted here: {done.stderr.strip()}")
            points.append(point)
        yield points
    finally:
        for point in points:
            subprocess.run(["umount", point], check=True)


def test_containers_of_one_image_share_a_file(build: Builder, tmp_path: Path) -> None:
    lower = tmp_path / "lower"
    lower.mkdir()
    shutil.copy(build("patched.c"), lower / "prog")
    with overlays(lower, tmp_path) as points:
        one, other = (point / "prog" for point in points)
        with running(one) as first, running(other) as second:
            assert file_id(one) != file_id(other)
            (found,) = look("prog", [], [first, second])
            assert (found.path, found.aliases) == (one, (other,))
            # A uprobe in the one is in the other as well.
            module = Module.load(found.path)
            offset = module.file_offset(module.address_of("first"))
            with uprobes(found.path, [offset]):
                for pid, path in ((first, one), (second, other)):
                    assert code_at(pid, path, offset) == 0xCC
            # Both are reached when the containers have gone.
            (found,) = module_files("prog", [], [first, second])
            identities = [file_id(one), file_id(other)]
        with Descriptors(found.descriptors):
            assert [file_id(descriptor_path(each)) for each in found.descriptors] == identities
        with other.open("r+b"):
            pass  # the second container has a file of its own from now on
        with running(one) as first, running(other) as second:
            assert len(look("prog", [], [first, second])) == 2


def code_at(pid: int, path: Path, offset: int) -> int:
    (mapper,) = find_mappers(path, [pid])
    address = run_time_address(mapper.mappings, offset)
    assert address is not None
    with Path(f"/proc/{pid}/mem").open("rb") as memory:
        memory.seek(address)
        return memory.read(1)[0]


def test_what_the_kernel_maps_into_every_process_has_no_file() -> None:
    assert look("[vdso]") == []


def test_a_process_that_has_ended_is_passed_over(build: Builder) -> None:
    program = build("patched.c")
    with running(program) as pid:
        pass
    assert look(program.name, [], [pid]) == []


def test_a_process_without_its_first_thread_shows_its_files(build: Builder, tmp_path: Path) -> None:
    program = tmp_path / "moved"
    shutil.copy(build("leaderless_reader.c"), program)
    with running(program) as pid:
        program.unlink()
        (found,) = look("moved", [], [pid])
        assert found.path.parts[3] == "map_files"

# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.target.module_lookup import (
    CachedLibrary,
    advice_on_name,
    executable_of,
    find_module,
    matches,
    near_modules,
    parse_ld_cache,
    read_ld_cache,
    suggestion,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from unit.target.conftest import Toolbox

    ErrorOf = Callable[[Callable[[], object]], tuple[str, str | None]]

WAIT = """
#include <stdio.h>
int work(void);
int main(void) { work(); puts("ready"); fflush(stdout); return getchar() == 'x'; }
"""


@pytest.fixture
def waiting(tools: Toolbox, tmp_path: Path, versioned: Path) -> Path:
    """A program that waits for input, with a library of its own named otherwise than its SONAME says."""
    shutil.copy(versioned, tmp_path / "libversioned-1.7.so")
    (tmp_path / "libversioned.so.1").symlink_to("libversioned-1.7.so")
    built = tools.build("waiting", {"waiting.c": WAIT}, str(versioned), f"-Wl,-rpath,{tmp_path}")
    return Path(shutil.copy(built, tmp_path / "waiting-1.7"))


@contextmanager
def running(path: Path) -> Iterator[int]:
    with subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert b"ready\n" == child.stdout.readline()
        yield child.pid
        child.kill()


def test_name_with_a_slash_is_a_path(pie: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pie.parent)
    assert pie == find_module("./pie")
    assert pie == find_module(str(pie))
    assert find_module("./absent") is None
    assert find_module(str(tmp_path)) is None
    assert find_module("") is None
    assert find_module("a\0b") is None


def test_mapped_file_is_found_by_base_name_link_and_soname(waiting: Path) -> None:
    directory = waiting.parent.resolve()
    library = directory / "libversioned-1.7.so"
    with running(waiting) as pid:
        assert waiting == find_module("waiting-1.7", pid=pid)
        assert library == find_module("libversioned-1.7.so", pid=pid)
        assert library == find_module("libversioned.so.1", pid=pid)
        (directory / "libversioned.so.1").unlink()
        assert library == find_module("libversioned.so.1", pid=pid)  # now by SONAME alone
        libc = find_module("libc.so.6", pid=pid)
        assert libc is not None
        assert str(libc) in Path(f"/proc/{pid}/maps").read_text()
        assert find_module("libno_such.so", pid=pid) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="others may not see what a process maps but by its path")
def test_file_that_was_replaced_under_the_process_is_the_one_that_it_maps(waiting: Path) -> None:
    library = waiting.parent.resolve() / "libversioned-1.7.so"
    contents = library.read_bytes()
    with running(waiting) as pid:
        new = library.with_name("new")
        new.write_bytes(waiting.read_bytes())
        new.rename(library)
        through = f"/proc/{pid}/root{library}"
        for name in ("libversioned-1.7.so", "libversioned.so.1", str(library), through):
            found = find_module(name, pid=pid)
            assert found is not None
            assert found.read_bytes() == contents
        assert library == find_module(str(library))


def test_file_that_was_replaced_under_a_process_that_shows_nothing_is_an_error(
    waiting: Path, error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = waiting.parent.resolve() / "libversioned-1.7.so"
    monkeypatch.setattr("dprobes.target.module_lookup.held_files", lambda _, pid: (Path(f"/proc/{pid}/exe"),))
    with running(waiting) as pid:
        library.unlink()
        waiting.unlink()
        assert Path(f"/proc/{pid}/exe") == find_module("waiting-1.7", pid=pid)
        message = f"MISMATCH: '{library}' was replaced or removed while process {pid} uses it"
        hint = "run dprobes as root, which can read the mapped file, or restart the process"
        assert (message, hint) == error_of(lambda: find_module("libversioned-1.7.so", pid=pid))
        assert (message, hint) == error_of(lambda: find_module(str(library), pid=pid))


def test_process_in_another_mount_namespace_is_seen_through_its_root(tools: Toolbox, waiting: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a mount namespace")
    script = f"mount -t tmpfs none /mnt && cp {waiting} /mnt/inside && exec /mnt/inside"
    command = ["unshare", "-m", "sh", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert b"ready\n" == child.stdout.readline()
        expected = Path(f"/proc/{child.pid}/root/mnt/inside")
        assert [expected] * 2 == [find_module(name, pid=child.pid) for name in ("inside", "/mnt/inside")]
        assert expected.read_bytes() == waiting.read_bytes()
        child.kill()


def test_program_of_the_command_is_found_by_link_and_real_name(pie: Path, tmp_path: Path) -> None:
    (tmp_path / "second").symlink_to(pie)
    (tmp_path / "first").symlink_to("second")
    command = str(tmp_path / "first")
    assert [pie] * 3 == [find_module(name, command=command) for name in ("first", "second", "pie")]
    assert find_module("third", command=command) is None


def test_script_means_its_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    shell = Path("/bin/sh").resolve()
    assert shell == find_module(shell.name, command=str(script))
    assert script != find_module("script", command=str(script))


def test_libraries_are_those_that_the_loader_takes(tools: Toolbox, libc: Path) -> None:
    listed = tools.run("ldd", "/usr/bin/env")
    for name, path in re.findall(r"(\S+) => (\S+)", listed):
        assert Path(path).resolve() == find_module(name)
    assert find_module("libc.so.6", architecture="vax") is None


@pytest.mark.parametrize(("architecture", "triplet"), [("s390x", "s390x-linux-gnu"), ("ppc64", "powerpc64-linux-gnu")])
def test_libraries_of_other_processors_are_those_of_their_compilers(architecture: str, triplet: str) -> None:
    library = Path(f"/usr/{triplet}/lib/libc.so.6")
    if not library.exists():
        pytest.skip(f"there are no libraries of {triplet}")
    assert find_module("libc.so.6", architecture=architecture) == library.resolve()


def test_program_is_found_in_path(tmp_path: Path, pie: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_program").symlink_to(pie)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pie == find_module("my_program")


def test_library_of_another_architecture_is_chosen_on_request(
    i386: Path, pie: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [
        CachedLibrary("libx.so", str(path), machine, False) for path, machine in ((i386, "i386"), (pie, "x86_64"))
    ]
    monkeypatch.setattr("dprobes.target.module_lookup.read_ld_cache", lambda: entries)
    monkeypatch.setattr("dprobes.target.module_lookup.host_architecture", lambda: "x86_64")
    assert pie == find_module("libx.so")
    assert i386 == find_module("libx.so", architecture="i386")


def test_matching_a_mapped_file(tmp_path: Path, pie: Path) -> None:
    real, link = tmp_path / "real-1.0", tmp_path / "real"
    shutil.copy(pie, real)
    link.symlink_to(real)
    (tmp_path / "other").symlink_to(pie)
    assert matches("real-1.0", str(real), None)
    assert matches("real", real, None)
    assert matches("librenamed.so.1", real, "librenamed.so.1")
    assert matches(str(link), real, None)
    assert matches(str(real), real, None)
    assert not matches("other", real, None)
    assert not matches("real-1", real, "libother.so")
    assert not matches("/real-1.0", real, None)
    assert matches("gone", "/no/such/gone", None)


def test_a_name_that_nobody_maps_has_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").touch()
    mapped = {"libc.so.6": "/lib/libc.so.6", "ld-linux-x86-64.so.2": "/lib/ld", "own": "/opt/own"}
    assert advice_on_name("libc", mapped) == "processes mapped '/lib/libc.so.6': is one of them the intended one?"
    here = "a name without '/' is not looked for in the current directory: write name = \"./own\""
    assert advice_on_name("own", {}) == here
    relative = f"a relative path is taken from the current directory: 'bin/own' is '{tmp_path}/bin/own'"
    assert advice_on_name("bin/own", mapped) == relative
    assert advice_on_name("/bin/own", mapped) == "processes mapped '/opt/own': is that the intended one?"
    assert advice_on_name("/opt/own", mapped) is None
    assert advice_on_name("/lib/libc", mapped) == "processes mapped '/lib/libc.so.6': is one of them the intended one?"
    assert advice_on_name("nothing", mapped) is None
    assert advice_on_name("n" * 256, mapped) is None


def test_near_modules_are_suggested(libc: Path) -> None:
    assert "libc.so.6" == near_modules("libc")[0]
    assert "libc.so.6" in near_modules("libc.so")
    assert [] == near_modules("zzzzzzzzzz")
    assert "libc.so.6" == near_modules("c", pid=os.getpid())[0]
    assert "my_program" in near_modules("my_progam", command="/x/my_program")


def test_programs_that_run_or_are_in_path_are_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("sleepyhead", "sleepyhead-of-mine", "sleepyhaed.sh")
    for name in names[:2]:
        shutil.copy("/bin/sleep", tmp_path / name)
    (tmp_path / names[2]).write_text("#!/bin/sh\n")
    (tmp_path / names[2]).chmod(0o755)
    assert "did you mean 'sleepyhead'?" != suggestion("sleepyhed")
    with subprocess.Popen([tmp_path / "sleepyhead", "100"]) as process:
        assert "did you mean 'sleepyhead'?" == suggestion("sleepyhed")
        process.kill()
    monkeypatch.setenv("PATH", f"/nowhere:{tmp_path}")
    assert ["sleepyhead"] == near_modules("sleepyhaed")
    assert "did you mean 'sleepyhead-of-mine'?" == suggestion("sleepyhead")
    (tmp_path / names[1]).rename(tmp_path / "sleepyheap")
    assert "did you mean 'sleepyheap' or 'sleepyhead'?" == suggestion("sleepyhea")
    assert suggestion("zzzzzzzzzz") is None


def test_cache_holds_what_ldconfig_prints(tools: Toolbox) -> None:
    if shutil.which("ldconfig") is None and not Path("/sbin/ldconfig").exists():
        pytest.skip("ldconfig is not installed")
    text = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^\t(\S+) \(libc6,x86-64.*\) => (\S+)$", text, re.MULTILINE)
    assert listed == [(x.name, x.path) for x in read_ld_cache() if x.architecture == "x86_64"]


def cache(*entries: tuple[int, str, str, int]) -> bytes:
    strings, rows = b"", []
    start = 48 + 24 * len(entries)
    for flags, name, path, hardware in entries:
        rows.append(
            struct.pack("=iIIIQ", flags, start + len(strings), start + len(strings) + len(name) + 1, 0, hardware)
        )
        strings += f"{name}\0{path}\0".encode()
    return struct.pack("=20sII20x", b"glibc-ld.so.cache1.1", len(rows), len(strings)) + b"".join(rows) + strings


def test_cache_tells_architectures_apart_and_survives_damage(tmp_path: Path) -> None:
    data = cache((0x303, "a.so", "/l/a.so", 0), (3, "a.so", "/l32/a.so", 0), (0x803, "a.so", "/x32/a.so", 0))
    expected = [CachedLibrary("a.so", "/l/a.so", "x86_64", False), CachedLibrary("a.so", "/l32/a.so", "i386", False)]
    assert expected == parse_ld_cache(data)
    assert expected == parse_ld_cache(b"ld.so-1.7.0\0" + bytes(4) + data)  # behind the old format
    for size in range(len(data)):
        assert len(parse_ld_cache(data[:size])) <= 2
    assert [] == read_ld_cache(tmp_path / "absent")


def test_executable_of_a_command_follows_path_and_links(
    pie: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cmd").symlink_to(pie)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [pie] * 2 == [executable_of("cmd"), executable_of(str(tmp_path / "cmd"))]


@pytest.mark.parametrize(
    "line", ["#!/bin/sh", "#! /bin/sh -e", "#!/usr/bin/env sh", "#!/usr/bin/env -S sh -e", "#!/usr/bin/env -S A=1 sh"]
)
def test_executable_of_a_script_is_its_interpreter(tmp_path: Path, line: str) -> None:
    script = tmp_path / "script"
    script.write_text(f"{line}\n")
    script.chmod(0o755)
    outer = tmp_path / "outer"
    outer.write_text(f"#!{script}\n")
    outer.chmod(0o755)
    assert [Path("/bin/sh").resolve()] * 2 == [executable_of(str(script)), executable_of(str(outer))]


def test_env_without_a_program_to_start_is_the_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/usr/bin/env -S A=1\n")
    script.chmod(0o755)
    assert executable_of(str(script)) == Path("/usr/bin/env").resolve()


def test_commands_that_cannot_run_are_errors(tmp_path: Path, error_of: ErrorOf) -> None:
    hint = "write its path, or add its directory to PATH"
    assert ("command 'no_such_command' is not found", hint) == error_of(lambda: executable_of("no_such_command"))
    assert ("'/no/such' does not exist", None) == error_of(lambda: executable_of("/no/such"))
    assert (f"'{tmp_path}' is a directory, expected a program", None) == error_of(lambda: executable_of(str(tmp_path)))
    plain = tmp_path / "plain"
    plain.write_text("")
    error = f"'{plain}' is not executable", f"allow it with chmod +x {plain}"
    assert error == error_of(lambda: executable_of(str(plain)))
    script = tmp_path / "script"
    script.write_text("#!/no/such\n")
    script.chmod(0o755)
    message = f"the interpreter of '{script}' cannot be run: '/no/such' does not exist"
    assert (message, None) == error_of(lambda: executable_of(str(script)))
    script.write_text("#!\n")
    assert (f"'{script}' names no interpreter after '#!'", None) == error_of(lambda: executable_of(str(script)))
    script.write_text(f"#!{script}\n")
    message = f"'{script}' cannot be run: its interpreters are scripts, more than 5 deep"
    assert (message, None) == error_of(lambda: executable_of(str(script)))
    assert ("command '' is not a file name", None) == error_of(lambda: executable_of(""))


def test_python_is_found_in_its_own_process() -> None:
    assert Path(sys.executable).resolve() == find_module(Path(sys.executable).resolve().name, pid=os.getpid())

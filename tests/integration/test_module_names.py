"""A program that is executed through a link has the name of the link in all outputs: that of its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the ebpf engine needs root")


@needs_root
@pytest.mark.parametrize("engine", ["ptrace", "ebpf"])
def test_a_link_to_a_program_is_named_as_the_process_is(build: Builder, tmp_path: Path, engine: str) -> None:
    link = tmp_path / "server"
    (tmp_path / "checker").write_bytes(build("hotloop.c").read_bytes())
    (tmp_path / "checker").chmod(0o755)
    link.symlink_to("checker")

    def run(text: str, *options: str) -> str:
        command = [
            sys.executable,
            "-m",
            "dprobes",
            "run",
            "--engine",
            engine,
            *options,
            "-e",
            text,
            "--",
            str(link),
            "3",
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    for module in (str(link), "server"):
        said = run(f'"{module}":tick {{ printf("at %a%k", pc, ustack(2)) }}')
        assert said.count("at tick [server]\n") == 3
        assert said.count("tick [server]") == 6
        assert "main" in said
        assert "checker" not in said
        rows = run(f'"{module}":tick {{ @[probe, ustack(1)] = count() }}')
        assert "@[tick [server], \n    tick [server]\n]: 3\n" in rows
        (record, *_) = map(json.loads, run(f'"{module}":tick {{ printf("%a", pc) }}', "--format", "json").splitlines())
        assert record["fields"]["pc"]["name"] == "tick [server]"
    # A library's function, called by the program:
    said = run('libc.so.6:_exit { printf("%k", ustack()) }')
    assert "[libc.so.6]" in said
    assert "[server]" in said or "server+0x" in said
    assert "checker" not in said


def test_locate_names_the_file_and_the_link(build: Builder, tmp_path: Path) -> None:
    (tmp_path / "server").symlink_to(build("hotloop.c"))
    for place, said in (
        (tmp_path / "server", f"module    {build('hotloop.c')}, to which 'server' is a link"),
        (build("hotloop.c"), f"module    {build('hotloop.c')}"),
        ("libsqlite3.so.0", "module    /usr/lib/x86_64-linux-gnu/libsqlite3.so.0.8.6"),
    ):
        command = [sys.executable, "-m", "dprobes", "locate", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[0] == said

"""The numbers of processes behind a name that was given in the place of one."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

from click.testing import CliRunner

from dprobes.cli.command_group import command_group
from dprobes.cli.shared_options import processes_named

if TYPE_CHECKING:
    from pathlib import Path

NAME = "dprobes_named_so"
"""A name of which the kernel keeps 15 characters: the file has all of them."""


def test_the_processes_that_execute_a_file_of_the_name_are_listed(tmp_path: Path) -> None:
    assert processes_named(NAME) == "and none has that name"
    program = tmp_path / NAME
    shutil.copy("/usr/bin/sleep", program)
    with ExitStack() as stack:
        running = [stack.enter_context(subprocess.Popen([program, "60"])) for _ in range(7)]
        for each in running:
            stack.callback(each.kill)
        pids = sorted(each.pid for each in running)
        assert processes_named(NAME) == f"processes of that name are {', '.join(map(str, pids[:5]))} and 2 more"
        for each in running[1:]:
            each.kill()
            each.wait()
        assert processes_named(NAME) == f"the process of that name is {running[0].pid}"
        done = CliRunner().invoke(command_group, ["list", "-p", NAME])
        assert done.exit_code == 2
        assert (
            f"Error: Invalid value for '-p' / '--pid': '{NAME}' is not the number of a process; "
            f"the process of that name is {running[0].pid}\n"
        ) in done.output


def test_a_number_that_is_too_small_is_none_of_a_process() -> None:
    done = CliRunner().invoke(command_group, ["list", "-p", "-3"])
    assert done.exit_code == 2
    assert "-3 is not in the range x>=1" in done.output

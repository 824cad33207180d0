"""What is said of USDT probes: by errors, and by list, locate and show."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

from integration.support import DPROBES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def refused(text: str) -> str:
    done = subprocess.run([*DPROBES, "check", "-"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return done.stderr + done.stdout


def test_wrong_names_and_arguments_are_errors_that_say_what_there_is(usdt: Callable[..., Path]) -> None:
    program = usdt("-O2")
    header = f'name = "{program}"\n'
    assert (
        f"error: '{program}' has no USDT probe 'usdt:demo:guardet'\n"
        "    offset = usdt:demo:guardet\n    ^~~~~~~~~~~~~~~~~~~~~~~~~~\nhint: did you mean 'usdt:demo:guarded'?\n"
    ) in refused(f"{header}offset = usdt:demo:guardet\nexit\n")
    assert "hint: it has probes of 'demo'\n" in refused(f"{header}offset = usdt:kernel:zzzzzzz\nexit\n")
    assert (
        f"error: argument 3 does not exist: 'usdt:demo:many' has 3 sites in '{program}', with 2 arguments\n"
        "    push usdt, 3\n               ^\n"
    ) in refused(f"{header}offset = usdt:demo:many\npush usdt, 3\nlog 1\nexit\n")
    assert (
        f"error: argument 3 does not exist: 'usdt:demo:[mg]*' has 4 sites in '{program}', with 2 arguments at most\n"
    ) in refused(f'{header}offset = "usdt:demo:[mg]*"\npush usdt, 3\nlog 1\nexit\n')
    assert refused(f"{header}offset = usdt:demo:many\npush usdt, 13\nlog 1\nexit\n").count("error:") == 1
    assert "error: '/usr/bin/true' has no USDT probes\n" in refused('name = "/usr/bin/true"\noffset = usdt:a:b\nexit\n')
    assert (
        f"error: no site of 'usdt:demo:guarded' in '{program}' can carry this probe: usdt:demo:guarded: it is the "
        "place of another probe definition\n"
    ) in refused(f"{header}offset = usdt:demo:guarded\nexit\noffset = usdt:demo:guarded\nexit\n")


def test_list_locate_and_show_have_the_arguments(usdt: Callable[..., Path]) -> None:
    program = usdt("-O2")

    def said(*arguments: str, text: str = "") -> str:
        done = subprocess.run([*DPROBES, *arguments], input=text, capture_output=True, text=True, check=True)
        return done.stdout

    listed = said("list", f"{program}:usdt")
    assert re.search(r"^usdt:demo:guarded +1 +s64 +yes$", listed, re.MULTILINE)
    assert re.search(r"^usdt:demo:number +1 +f64, f32 +yes$", listed, re.MULTILINE)
    assert re.search(
        r"^usdt:demo:widths +1 +s8, u8, s16, u16, s32, u32, s64, u64, s32, s64 +yes$", listed, re.MULTILINE
    )
    assert listed in said("list", str(program))
    located = said("locate", f"{program}:usdt:demo:many")
    assert located.count("at file offset") == 3
    assert re.search(r"^ +push usdt, 2 +s64 +shared\(%rip\)$", located, re.MULTILINE)
    assert located.count("guarded by a semaphore, which is raised while the probe is inserted") == 3
    shown = said("show", "-", text=f'name = "{program}"\noffset = usdt:demo:guarded\nexit\n')
    assert "// push usdt, 1   s64  " in shown

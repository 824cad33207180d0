"""Commands and outputs that pages of the documentation show, and how tests run them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from integration.support import DPROBES

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^([$#]) (.*)\n((?:(?![$#] ).*\n)*)", re.MULTILINE)


class Step(NamedTuple):
    """A command of a page; ``root`` is whether the page runs it as root."""

    command: str
    output: str
    root: bool


def steps_of(page: Path) -> list[Step]:
    """Return the commands in the page's console blocks, in their order."""
    return [
        Step(command, output, prompt == "#")
        for block in _BLOCK.findall(page.read_text())
        for prompt, command, output in _COMMAND.findall(block)
    ]


def under_test(step: Step) -> str:
    """
    Return the step's line for a shell, with the dprobes under test.

    An ordinary user has handlers run in the process, where root has the kernel run them: the engine is given to root.
    Handlers that change the target have the same engine for both.
    """
    chosen = step.root or "--engine" in step.command or "--allow-write" in step.command
    inline = os.geteuid() == 0 and not chosen
    run = " run --engine inline" if inline else " run"
    tool = " ".join(DPROBES)
    return re.sub(r"\bdprobes( run\b| )", lambda found: tool + (run if "run" in found[1] else " "), step.command)


def shapes(text: str) -> set[str]:
    """Return the lines of an output without what differs from run to run: times, ids, numbers, names in call stacks."""
    text = re.sub(r"^\d\d:\d\d:\d\d\.\d{6}  (\S+)\[\d+\]", r"TIME  \1[PID]", text, flags=re.MULTILINE)
    text = re.sub(r"^[\[.][^|\n]*? +\d+ \|[@ ]*\|$", "BUCKET", text, flags=re.MULTILINE)
    text = re.sub(r"^    (?!malloc \[).*$", "    FRAME", text, flags=re.MULTILINE)
    text = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?( [nmu]?s\b)?", "N", text)
    text = re.sub(r"^@: N rows? .*\n", "", text, flags=re.MULTILINE)  # more than --rows: as the libraries are built
    # A call that had begun before the probepoint was there.
    text = re.sub(r"^N faults? at .* an entry that was not seen\n?", "", text, flags=re.MULTILINE)
    return {" ".join(line.split()) for line in text.splitlines() if line.strip()}

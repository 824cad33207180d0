"""Log targets of other packages, installed as pip does it, and what they do wrong."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.manager.sandbox import Sandbox, Service, service
from integration.support import await_true

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.support import Builder

SAMPLE = Path(__file__).parents[3] / "examples" / "tally"

OTHERS = """
import sys
from dprobes.errors import SinkError

class Sink:
    def create_event(self, source): pass
    def log_events(self, batch): pass
    def destroy_event(self, source): pass
    def flush(self): pass
    def close(self): pass

class Stumbling(Sink):
    count = 0
    def log_events(self, batch):
        type(self).count += 1
        if type(self).count == 1:
            1 / 0

class Leaving(Sink):
    def log_events(self, batch):
        sys.exit("a log target wanted to leave")

class Half:
    def log_events(self, batch): pass
    def flush(self): pass
    close = None

def stumbling(argument, options): return Stumbling()
def leaving(argument, options): return Leaving()
def half(argument, options): return Half()
def nothing(argument, options): return None
def exploding(argument, options): raise KeyError(argument)
def refusing(argument, options): raise SinkError("it is not in the mood", hint="ask tomorrow")
def narrow(argument): return Sink()
number = 5
"""

PROGRAM = """name = "{library}"
major = 5
offset = write_file
minor = 1
exit
offset = release_memory
minor = 2
exit
"""


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path)
    yield made
    made.close()


@pytest.fixture
def install(sandbox: Sandbox) -> Callable[..., None]:
    """Return a function that makes packages visible to commands, as pip does it, with the log targets it is given."""

    def install(package: str = "others", module: str = "dprobes_others", **targets: str) -> None:
        directory = sandbox.directory / "packages"
        information = directory / f"{package}-1.0.dist-info"
        information.mkdir(parents=True)
        (directory / "dprobes_others.py").write_text(OTHERS)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        points = "".join(f"{name} = {module}:{attribute}\n" for name, attribute in targets.items())
        (information / "entry_points.txt").write_text("[dprobes.sinks]\n" + points)
        path = sandbox.environment.get("PYTHONPATH", "").split(os.pathsep)
        wanted = [str(directory), str(SAMPLE), *path]
        sandbox.environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, wanted)))

    return install


@pytest.fixture
def target(build: Builder) -> Iterator[Service]:
    with service(build) as started:
        yield started


@pytest.fixture
def source(sandbox: Sandbox, target: Service) -> Path:
    return sandbox.write("service.rpn", PROGRAM.format(library=target.library))


def test_the_sample_counts_in_a_run_and_in_the_manager(
    sandbox: Sandbox, target: Service, source: Path, install: Callable[..., None]
) -> None:
    install("dprobes-tally", "dprobes_tally", tally="open_tally")
    assert "tally:…" in sandbox("dprobes log-target kinds")
    calls = f"printf 'write_file 5\\nrelease_memory 3\\n' | {target.program}"
    sandbox(f'dprobes run {source} --engine ptrace --log-target tally:run.txt -c "sh -c \\"{calls}\\""')
    expected = [f"{target.library} write_file 5,1 5", f"{target.library} release_memory 5,2 3"]
    assert (sandbox.directory / "run.txt").read_text().splitlines() == expected

    output = sandbox.directory / "managed.txt"
    sandbox(f"dprobes insert {source} --as svc -p {target.pid}")
    sandbox(f"dprobes log-target add tally:{output}")  # late
    target.call("write_file", 7)
    await_true(lambda: sandbox.counts("svc", "records")[1] == 7, "seven records")
    sandbox("dprobes remove --name svc")
    await_true(lambda: output.read_text() == "svc write_file 5,1 7\n", "the counts")
    assert "tally:" in sandbox("dprobes log-target remove tally:" + str(output))
    assert sandbox.refused("dprobes log-target add tally:/no/such/file") == (
        "dprobes: error: '/no/such/file' cannot be written: No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half:", "'half': its plug-in returned no sink but Half, which lacks create_event, destroy_event, close"),
        ("nothing", "'nothing': its plug-in returned no sink but NoneType, which lacks create_event, log_events, "),
        ("exploding:x", "'exploding:x': its plug-in failed: KeyError: 'x'"),
        ("narrow", "'narrow': its plug-in failed: TypeError: narrow() takes 1 positional argument but 2 were given"),
        ("number", "'number': its plug-in failed: TypeError: 'int' object is not callable"),
        ("missing", "'missing': its plug-in dprobes_others:nowhere cannot be loaded: AttributeError: "),
        ("halt:", "there is no log target 'halt:'\nhint: did you mean 'half'?"),
    ],
)
def test_a_plug_in_that_is_wrong_is_an_error_before_anything_starts(
    sandbox: Sandbox, target: Service, source: Path, install: Callable[..., None], name: str, message: str
) -> None:
    kinds = ("half", "nothing", "exploding", "narrow", "number")
    install(**{kind: kind for kind in kinds}, missing="nowhere")
    marker = sandbox.directory / "started"
    said = sandbox.refused(f"dprobes run {source} --engine ptrace --log-target {name} -- touch {marker}")
    prefix = "" if message.startswith("there is") else "log target "
    assert said.startswith(f"dprobes: error: {prefix}{message}")
    assert "Traceback" not in said
    assert not marker.exists()


def test_what_a_plug_in_refuses_is_said_as_it_says_it(
    sandbox: Sandbox, source: Path, install: Callable[..., None]
) -> None:
    install(refusing="refusing")
    said = sandbox.refused(f"dprobes run {source} --engine ptrace --log-target refusing -- true")
    assert said == "dprobes: error: it is not in the mood\nhint: ask tomorrow\n"


def test_two_packages_with_one_name_are_an_error(sandbox: Sandbox, source: Path, install: Callable[..., None]) -> None:
    install("one", stumbling="stumbling")
    install("two", stumbling="leaving")
    said = sandbox.refused(f"dprobes run {source} --engine ptrace --log-target stumbling -- true")
    assert said == (
        "dprobes: error: more than one plug-in has the log target 'stumbling': those of one and two\n"
        "hint: uninstall one of them\n"
    )


def test_a_plug_in_cannot_take_a_name_of_ours(sandbox: Sandbox, source: Path, install: Callable[..., None]) -> None:
    install(file="exploding")
    sandbox(f"dprobes run {source} --engine ptrace --log-target file:{sandbox.directory}/out -- true || true")
    assert (sandbox.directory / "out").exists()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("stumbling", "ZeroDivisionError: division by zero"),
        ("leaving", "SystemExit: a log target wanted to leave"),
    ],
)
def test_a_plug_in_that_fails_loses_its_records_and_nobody_elses(
    sandbox: Sandbox, target: Service, source: Path, install: Callable[..., None], name: str, problem: str
) -> None:
    install(stumbling="stumbling", leaving="leaving")
    output = sandbox.directory / "out"
    calls = f"echo write_file 10 | {target.program}"
    done = sandbox.shell(
        f'dprobes run {source} --engine ptrace --log-target {name} --log-target {output} -c "sh -c \\"{calls}\\""'
    )
    assert done.returncode == 0
    assert f"dprobes: warning: log target {name}: {problem}\n" in done.stderr
    lost = re.search(rf"dprobes: warning: log target {name} has lost (\d+) records?", done.stderr)
    assert lost is not None
    assert 1 <= int(lost[1]) <= 10
    assert output.read_text().count("  write_file  ") == 10
    assert "Traceback" not in done.stderr

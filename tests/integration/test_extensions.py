"""Extensions of other packages run in handlers, and what they do wrong harms nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf
from integration.support import DPROBES, TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.support import Builder, Result, Runner

SAMPLE = Path(__file__).parents[2] / "examples" / "fingerprint"

OTHERS = """
import os
import sys
from dprobes.extensions import ExceptionCode, Extension, Raised

def write(view):
    address = view.register("arg0")
    view.write(address, b"WRITTEN")
    view.log_string(view.read_string(address, 7))

def stray(view):
    view.push(99)
    view.write(view.register("arg0"), b"STRAY")

def leave(view):
    view.log(b"gone")
    sys.exit("an extension wanted to leave")

def look(view):
    view.local_variables[0] = view.pid
    view.log(view.word_size.to_bytes(1, view.byte_order) + bytes([view.log_room & 0xFF]))
    view.minor = 7

def complain(view):
    raise Raised(ExceptionCode.USER_EX, 11, 12)

def reach(view):
    view.read(0, 4)

write = Extension(interpret=write, writes=True)
stray = Extension(interpret=stray)
leave = Extension(interpret=leave)
look = Extension(interpret=look)
complain = Extension(interpret=complain)
reach = Extension(interpret=reach)
first = Extension(interpret=lambda view: view.log(b"1"))
second = Extension(interpret=lambda view: view.log(b"2"))
no_extension = 5
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes packages visible, as pip does it, that register the extensions it is given."""

    def install(package: str = "others", module: str = "dprobes_others", **extensions: str) -> None:
        directory = tmp_path / "packages"
        information = directory / f"{package}-1.0.dist-info"
        information.mkdir(parents=True)
        (directory / "dprobes_others.py").write_text(OTHERS)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        points = "".join(f"{name} = {module}:{attribute}\n" for name, attribute in extensions.items())
        (information / "entry_points.txt").write_text("[dprobes.extensions]\n" + points)
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        wanted = [str(directory), str(SAMPLE), *path]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(dict.fromkeys(filter(None, wanted))))

    return install


def on_look(handler: str) -> str:
    return f"name = memory\nvars = 3\noffset = look\nminor = 1\n{handler}\nexit\n"


def run_on_look(build: Builder, run: Runner, handler: str, *options: str, i386: bool = False) -> Result:
    program = build("memory.c", i386=i386)
    return run(on_look(handler), ["--exit-status", "--", str(program)], options)


@pytest.fixture(params=["ptrace", "ebpf"])
def engine(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return the options for each engine that runs extensions which have both forms."""
    if request.param == "ebpf":
        require_bpf()
    return "--engine", request.param


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_the_sample_says_what_is_in_memory(
    build: Builder,
    run: Runner,
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    engine: tuple[str, str],
    i386: bool,
) -> None:
    install("dprobes-fingerprint", "dprobes_fingerprint", fingerprint="fingerprint")
    handler = "sx fault; push 6; push r, arg0; callk fingerprint; log 1; exit; fault: log 3"
    result = run_on_look(build, run, handler, *engine, i386=i386)
    assert result.status == 0, result.stderr
    monkeypatch.syspath_prepend(str(SAMPLE))
    from dprobes_fingerprint import fnv1a  # type: ignore[import-not-found]

    assert fnv1a(b"foobar") == 0xBF9CF968  # a published test vector
    words = result.words(size=4 if i386 else 8)
    pages = int(result.stdout.split()[0])
    assert words[:2] == [[fnv1a(b"across")], [fnv1a(b"ending")]]
    assert words[2] == [1, pages + 2 * 4096, 0]
    del sys.modules["dprobes_fingerprint"]


def test_the_samples_program_tells_equal_writes(
    run: Runner, install: Callable[..., None], engine: tuple[str, str]
) -> None:
    install("dprobes-fingerprint", "dprobes_fingerprint", fingerprint="fingerprint")
    script = "import os; [os.write(1, text) for text in (b'one', b'two', b'one')]"
    result = run((SAMPLE / "writes.rpn").read_text(), ["--", sys.executable, "-c", script], engine)
    assert result.status == 0, result.stderr
    assert result.stdout == "onetwoone"
    hashes = [words[2] for words in result.words() if words[:2] == [1, 3]]
    assert hashes[0] == hashes[2] != hashes[1]


def test_an_engine_that_finds_no_form_of_its_own_refuses_the_program(
    build: Builder, run: Runner, install: Callable[..., None]
) -> None:
    require_bpf()
    install(look="look")
    result = run_on_look(build, run, "callk look", "--engine", "ebpf")
    assert result.status == 2
    assert result.stderr.split("\n", 1)[1] == (
        "    callk look\n    ^~~~~~~~~~\nhint: use --engine ptrace with -c COMMAND or -p PID\n"
    )
    assert "'callk look' needs extensions that have no form for eBPF, which the ebpf engine lacks" in result.stderr


def test_callk_alone_calls_all_in_order_of_registration(
    build: Builder, run: Runner, install: Callable[..., None]
) -> None:
    install("b-package", b="second", a="first")
    install("a-package", z="first", y="second")
    result = run_on_look(build, run, "callk; callk a; callk z")
    assert result.status == 0, result.stderr
    # z, y of the package that comes first by name, then b, a.
    assert [bytes.fromhex(r["data"]) for r in result.records] == [b"122111"] * 4


def test_an_extension_sees_the_hit(build: Builder, run: Runner, install: Callable[..., None]) -> None:
    install(look="look")
    result = run_on_look(build, run, "push 1; log b, 1; callk look; push lv, 0; log 1")
    assert result.status == 0, result.stderr
    for record in result.records:
        data = bytes.fromhex(record["data"])
        assert (data[:3], record["minor"]) == (bytes([1, 8, 0xFF]), 7)
        assert int.from_bytes(data[3:], "little") == record["pid"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lok", "there is no extension 'lok'|hint: did you mean 'look'?"),
        ("xyzzy", "there is no extension 'xyzzy'|hint: there are: look, broken, missing, wrong, write"),
        ("broken", "the extension 'broken' of the package 'others' cannot be loaded: AttributeError"),
        ("missing", "the extension 'missing' of the package 'others' cannot be loaded: AttributeError"),
        ("wrong", "the extension 'wrong' of the package 'others' is not a dprobes.extensions.Extension but int"),
        ("write", "'callk write' writes to the target: the extension 'write' does|hint: allow it with --allow-write"),
        ("", "'callk' writes to the target: the extension 'write' does"),
    ],
)
def test_a_bad_call_is_an_error_at_its_line_before_anything_starts(
    build: Builder, run: Runner, install: Callable[..., None], tmp_path: Path, name: str, message: str
) -> None:
    install(look="look", broken="look.nothing", missing="nothing", wrong="no_extension", write="write")
    marker = tmp_path / "started"
    result = run(on_look(f"nop\ncallk {name}"), ["--", "touch", str(marker)])
    assert result.status == 2
    assert ".rpn:6:" in result.stderr
    for text in message.split("|"):
        assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert not marker.exists()


def test_a_name_that_two_packages_register_is_an_error(
    build: Builder, run: Runner, install: Callable[..., None]
) -> None:
    install("one", look="look")
    install("two", look="look")
    result = run_on_look(build, run, "callk look")
    assert result.status == 2
    assert "more than one extension is called 'look': those of one and two" in result.stderr
    assert "hint: uninstall one of them" in result.stderr


def test_a_writing_extension_writes_with_permission(build: Builder, run: Runner, install: Callable[..., None]) -> None:
    install(write="write")
    result = run_on_look(build, run, "sx fault; callk write; exit; fault: log 3", "--allow-write")
    assert result.status == 0, result.stderr
    assert [bytes.fromhex(r["data"]) for r in result.records][:1] == [b"\x01\x07\x00WRITTEN"]
    assert [words[0] for words in result.words()][2:] == [1, 1]  # not writable: INVALID_ADDR


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("stray", "PermissionError: the extension writes to the target, but is not declared with writes=True"),
        ("leave", "SystemExit: an extension wanted to leave"),
    ],
)
def test_an_extension_that_fails_becomes_an_exception_and_a_warning(
    build: Builder, run: Runner, install: Callable[..., None], name: str, what: str
) -> None:
    install(look="look", stray="stray", leave="leave")
    handler = f"push 5; sx failed; callk {name}; abort; failed: log 3; log 1"
    result = run_on_look(build, run, handler)
    assert result.status == 0, result.stderr
    assert result.words() == [[0x40, 6, 0, 5]] * 4
    assert result.stderr.count(f"dprobes: warning: the extension '{name}' failed: {what} (") == 1
    assert "STRAY" not in result.stdout


def test_what_an_extension_raises_on_purpose_is_what_the_handler_gets(
    build: Builder, run: Runner, install: Callable[..., None]
) -> None:
    install(complain="complain", reach="reach")
    source = on_look("sx a; callk complain; abort; a: log 3; sx b; callk reach; abort; b: log 3")
    source = source.replace("minor = 1", "minor = 1\nex_mask = 0x8fff")
    result = run(source, ["--exit-status", "--", str(build("memory.c"))])
    assert result.status == 0, result.stderr
    assert result.words() == [[0x8000, 11, 12, 1, 0, 0]] * 4
    assert "failed" not in result.stderr


def test_check_says_so_where_callk_calls_nothing(tmp_path: Path) -> None:
    source = tmp_path / "p.rpn"
    source.write_text("name = nothing_here\noffset = 0\nminor = 1\ncallk\nexit\n")
    done = subprocess.run([*DPROBES, "check", str(source)], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert "p.rpn:4:1: warning: 'callk' calls nothing: no package here registers an extension" in done.stderr

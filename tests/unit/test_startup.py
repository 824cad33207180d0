"""Modules are imported in shorter ways, and are the same modules."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes import startup

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return the directory of a package 'dprobes' with nothing but the module under test, and two others."""
    root = tmp_path / "dprobes"
    (root / "inner").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "startup.py").write_text(Path(startup.__file__).read_text())
    (root / "one.py").write_text("VALUE = 1\n")
    (root / "inner" / "__init__.py").write_text("VALUE = 2\n")
    (root / "inner" / "two.py").write_text("VALUE = 3\n")
    return root


@pytest.fixture
def run(package: Path) -> Callable[..., str]:
    """Return a function that executes text after ``install()`` in a process, and returns what that prints."""

    def run(text: str, **environment: str) -> str:
        program = "import sys\nfrom dprobes import startup\nstartup.install()\n" + textwrap.dedent(text)
        done = subprocess.run(
            [sys.executable, "-S", "-c", program],
            env={**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "", **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


WHAT = """
import dprobes.one, dprobes.inner.two, dprobes.inner
for module in (dprobes.one, dprobes.inner, dprobes.inner.two):
    print(module.VALUE, module.__name__, module.__package__, module.__file__, module.__cached__,
          getattr(module, "__path__", None), module.__spec__.origin, module.__spec__.has_location)
"""


def test_modules_are_what_python_makes_of_them(run: Callable[..., str]) -> None:
    quick = run(WHAT)
    assert quick == run("sys.meta_path.pop(0)\n" + WHAT)
    assert quick.count("dprobes") > 9
    assert run("import dprobes.one\nprint(type(dprobes.one.__loader__).__name__)") == "_QuickLoader\n"


def test_byte_code_is_written_and_read(run: Callable[..., str], package: Path) -> None:
    first = run("import dprobes.one")
    (cached,) = (package / "__pycache__").glob("one.*.pyc")
    content = cached.read_bytes()
    assert first == ""
    # Other byte code with the right head: that it is what is executed shows that the source was not compiled.
    other = content.replace(b"VALUE", b"OTHER")
    assert other != content
    cached.write_bytes(other)
    assert run("import dprobes.one\nprint(dprobes.one.OTHER)") == "1\n"


@pytest.mark.parametrize("damage", [lambda c: c[:20], lambda c: b"", lambda c: b"\0" * 16 + c[16:], lambda c: c[:12]])
def test_damaged_byte_code_is_made_again(
    run: Callable[..., str], package: Path, damage: Callable[[bytes], bytes]
) -> None:
    run("import dprobes.one")
    (cached,) = (package / "__pycache__").glob("one.*.pyc")
    content = cached.read_bytes()
    cached.write_bytes(damage(content))
    if damage(content)[:16] != content[:16]:
        assert run("import dprobes.one\nprint(dprobes.one.VALUE)") == "1\n"
        assert cached.read_bytes() == content
    else:
        # Python says so as well.
        with pytest.raises(AssertionError, match="EOFError: marshal data too short"):
            run("import dprobes.one")


def test_byte_code_of_another_source_is_not_used(run: Callable[..., str], package: Path) -> None:
    run("import dprobes.one")
    source = package / "one.py"
    source.write_text("VALUE = 77\n")
    assert run("import dprobes.one\nprint(dprobes.one.VALUE)") == "77\n"
    source.write_text("VALUE = 88\n")
    os.utime(source, (5, 5))
    assert run("import dprobes.one\nprint(dprobes.one.VALUE)") == "88\n"


def test_code_has_the_name_that_its_file_has_now(run: Callable[..., str], package: Path) -> None:
    (package / "one.py").write_text("def place():\n    return place.__code__.co_filename\n")
    subprocess.run([sys.executable, "-m", "compileall", "-q", "dprobes"], cwd=package.parent, check=True, timeout=60)
    assert run("import dprobes.one\nprint(dprobes.one.place())") == f"{package / 'one.py'}\n"


def test_byte_code_may_be_elsewhere(run: Callable[..., str], package: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert run("import dprobes.one\nprint(dprobes.one.VALUE)", PYTHONPYCACHEPREFIX=str(tmp_path / "cache")) == "1\n"
    assert not (package / "__pycache__").exists()
    assert len(list((tmp_path / "cache").rglob("one.*.pyc"))) == 1


def test_a_module_that_is_not_there_is_said_to_be_missing(run: Callable[..., str]) -> None:
    text = """
    try:
        import dprobes.three
    except ImportError as error:
        print(error)
    """
    assert run(text) == "No module named 'dprobes.three'\n"


def test_errors_in_a_module_are_those_of_python(run: Callable[..., str], package: Path) -> None:
    (package / "broken.py").write_text("VALUE = \n")
    text = """
    try:
        import dprobes.broken
    except SyntaxError as error:
        print(error.msg, error.lineno)
    """
    assert run(text) == "invalid syntax 1\n"


def test_late_modules_are_executed_when_they_are_used(run: Callable[..., str]) -> None:
    text = """
    import inspect
    print("dis" in sys.modules, inspect.cleandoc("  a line"), "dis" in sys.modules)
    print(inspect.cleandoc("two\\n    lines"), "dis" in sys.modules)
    print(inspect.isfunction(startup.install), inspect.cleandoc("  a line"), sys.modules["inspect"] is inspect)
    from inspect import signature
    print(signature(startup.install))
    print(inspect.getsource(startup.install).splitlines()[0])
    try:
        inspect.nothing
    except AttributeError as error:
        print(error)
    """
    assert run(text).splitlines() == [
        "False a line False",
        "two",
        "lines True",
        "True a line True",
        "() -> 'None'",
        "def install() -> None:",
        "module 'inspect' has no attribute 'nothing'",
    ]


def test_what_is_there_before_says_what_the_module_says(run: Callable[..., str]) -> None:
    text = """
    import difflib, gettext, inspect, pathlib, platform, urllib.parse
    from urllib.parse import quote_from_bytes
    print(["_late_loader" in vars(module) for module in (difflib, gettext, inspect, platform, urllib.parse)])
    print(difflib.get_close_matches("-p", ["-q", "--pid"]), gettext.gettext("a"), gettext.ngettext("b", "c", 2))
    print(pathlib.Path("/a b").as_uri(), urllib.parse.urlsplit("http://[::1]:80/x").port, quote_from_bytes(b"%"))
    print(difflib.get_close_matches("appel", ["ape", "apple", "peach"]), gettext.ngettext("b", "c", 1))
    print(platform.system() == platform.uname().system)
    print(["_late_loader" in vars(module) for module in (difflib, gettext, inspect, platform, urllib.parse)])
    """
    assert run(text).splitlines() == [
        "[True, True, True, True, True]",
        "[] a c",
        "file:///a%20b 80 %25",
        "['apple', 'ape'] b",
        "True",
        "[False, True, True, False, False]",
    ]


def test_late_modules_are_executed_once_whoever_asks(run: Callable[..., str]) -> None:
    text = """
    import ipaddress, threading
    seen = []
    def look():
        barrier.wait()
        seen.append(ipaddress.ip_address("127.0.0.1").is_loopback)
    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(seen == [True] * 8)
    """
    assert run(text) == "True\n"


def test_every_late_module_is_one_of_the_standard_library() -> None:
    assert {name.partition(".")[0] for name in startup.LATE} <= sys.stdlib_module_names

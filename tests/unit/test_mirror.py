"""The rule of CONTRIBUTING.md for ``tests/unit``: it mirrors ``src``."""

from __future__ import annotations

from pathlib import Path

UNIT = Path(__file__).parent
SOURCES = UNIT.parents[1] / "src" / "dprobes"


def packages_of_modules() -> dict[str, set[Path]]:
    """Return the packages, relative to ours, that hold a module or package of each name."""
    found: dict[str, set[Path]] = {}
    for path in SOURCES.rglob("*"):
        if path.suffix == ".py" or (path / "__init__.py").is_file():
            found.setdefault(path.stem, set()).add(path.parent.relative_to(SOURCES))
    return found


def subject(name: str, package: Path, packages: dict[str, set[Path]]) -> str:
    """Return the module of the package that a test file's name begins with, "" where it names none."""
    words = name.removeprefix("test_").split("_")
    prefixes = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    return next((prefix for prefix in prefixes if package in packages.get(prefix, ())), "")


def test_each_directory_of_unit_tests_is_a_package() -> None:
    directories = {path.parent.relative_to(UNIT) for path in UNIT.rglob("*.py")}
    strange = [path for path in directories if not (SOURCES / path / "__init__.py").is_file()]
    assert sorted(map(str, strange)) == ["tools"]  # tests of what is beside src


def test_no_test_has_the_name_of_a_module_of_another_package() -> None:
    packages = packages_of_modules()
    strangers = {}
    for path in UNIT.rglob("test_*.py"):
        package = path.parent.relative_to(UNIT)
        name = path.stem.removeprefix("test_")
        if not subject(path.stem, package, packages) and name in packages:
            strangers[str(path.relative_to(UNIT))] = sorted(map(str, packages[name]))
    assert strangers == {}


def test_a_name_is_of_the_longest_module_that_it_begins_with() -> None:
    packages = {"frames": {Path("trace")}, "frames_compressed": {Path("trace")}, "wire": {Path("engines/ptrace")}}
    assert subject("test_frames", Path("trace"), packages) == "frames"
    assert subject("test_frames_torn", Path("trace"), packages) == "frames"
    assert subject("test_frames_compressed_torn", Path("trace"), packages) == "frames_compressed"
    assert subject("test_wire", Path("trace"), packages) == ""

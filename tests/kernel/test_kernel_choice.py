"""One kernel is chosen for each test in a guest, and what is left out is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
KERNEL = re.compile(r"(?<=[\[-])6\.(?:1|12)(?=[\]-])")


def collected(*arguments: str) -> list[str]:
    """Return the names of the tests that would run."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments], cwd=TESTS.parent, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.fixture(scope="module")
def everything() -> list[str]:
    return collected("--all-kernels", "tests/kernel")


@pytest.fixture(scope="module")
def chosen() -> list[str]:
    return collected("tests/kernel")


def test_each_test_runs_on_a_kernel_and_each_kernel_has_its_share(everything: list[str], chosen: list[str]) -> None:
    assert set(chosen) < set(everything)
    assert {KERNEL.sub("", name) for name in chosen} == {KERNEL.sub("", name) for name in everything}
    left = Counter(found[0] for name in set(everything) - set(chosen) if (found := KERNEL.search(name)))
    assert set(left) == {"6.1", "6.12"}
    assert min(left.values()) > 0.35 * left.total()


def test_a_test_on_whose_subject_kernels_differ_runs_on_each(everything: list[str], chosen: list[str]) -> None:
    (lacks,) = {name.split("[")[0] for name in chosen if "test_the_kernel_lacks_what_the_table_says" in name}
    assert {f"{lacks}[6.1]", f"{lacks}[6.12]"} <= set(chosen)
    trampolines = "tests/kernel/test_trampolines.py::"  # all of them need a feature
    assert [name for name in chosen if trampolines in name] == [name for name in everything if trampolines in name]


def test_a_test_with_more_parameters_runs_on_one_kernel_for_each(chosen: list[str]) -> None:
    cases = [name for name in chosen if "test_cases_of_all_instructions_do_the_same" in name]
    assert sorted(KERNEL.sub("", name)[-2:] for name in cases) == ["0]", "1]"]


def test_what_is_chosen_does_not_depend_on_what_else_runs(chosen: list[str]) -> None:
    file = "tests/kernel/test_kernel_differential.py"
    assert collected(file) == [name for name in chosen if file in name]


def test_a_kernel_that_is_asked_for_is_had() -> None:
    test = "tests/kernel/test_kernel_differential.py::test_some_programs_do_the_same"
    assert len(collected(test)) == 1
    names = [f"{test}[{kernel}]" for kernel in ("6.1", "6.12")]
    assert [collected(name) for name in names] == [[name] for name in names]


COUNTING = """
from support.deselection import DeselectionCount

def pytest_configure(config):
    config.pluginmanager.register(DeselectionCount(config))
"""


def test_what_workers_leave_out_is_counted(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(COUNTING)
    (tmp_path / "test_three.py").write_text("def test_one(): pass\ndef test_two(): pass\ndef test_three(): pass\n")
    environment = ENVIRONMENT | {"PYTHONPATH": str(TESTS)}
    for workers in ("0", "2"):
        command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "no:cacheprovider", "-k", "one"]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert "1 passed, 2 deselected" in done.stdout.splitlines()[-1]

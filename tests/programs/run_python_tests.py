"""
Run modules of Python's own tests, and write how each test ended: a line each, as soon as it has.

Arguments: the file to write, a directory with more of the package ``test`` (or nothing), names of modules.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import unittest
from pathlib import Path
from typing import TextIO

import test  # type: ignore[import-not-found]
from test import support


class Outcomes(unittest.TestResult):
    """The outcome of each test, by its name."""

    def __init__(self, lines: TextIO) -> None:
        super().__init__()
        self._lines = lines
        self._how = ""

    def startTest(self, case: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        super().startTest(case)
        self._how = "passed"

    def stopTest(self, case: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        super().stopTest(case)
        print(case.id(), self._how, file=self._lines, flush=True)

    def addSkip(self, case: unittest.TestCase, reason: str) -> None:  # noqa: N802 - unittest's name
        super().addSkip(case, reason)
        self._how = "skipped"

    def addFailure(self, case: unittest.TestCase, error: object) -> None:  # noqa: N802 - unittest's name
        super().addFailure(case, error)  # type: ignore[arg-type]
        self._fail(case, self.failures[-1][1])

    def addError(self, case: unittest.TestCase, error: object) -> None:  # noqa: N802 - unittest's name
        super().addError(case, error)  # type: ignore[arg-type]
        self._fail(case, self.errors[-1][1])

    def addSubTest(self, case: unittest.TestCase, part: unittest.TestCase, error: object) -> None:  # noqa: N802 - unittest's name
        super().addSubTest(case, part, error)  # type: ignore[arg-type]
        if error is not None:
            self._fail(part, f"{error!r}")

    def addUnexpectedSuccess(self, case: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        super().addUnexpectedSuccess(case)
        self._how = "passed unexpectedly"

    def _fail(self, case: object, text: str) -> None:
        self._how = "failed"
        print(f"{case}: {text}", file=sys.stderr, flush=True)


def main(output: str, more: str, *modules: str) -> None:
    """Run modules, in a directory of their own."""
    support.use_resources = []
    if more:
        test.__path__.append(more)
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory), Path(output).open("w") as lines:
        for name in modules:
            unittest.defaultTestLoader.loadTestsFromName(f"test.{name}").run(Outcomes(lines))


main(*sys.argv[1:])

"""
Execution of an external C preprocessor, such as ``gcc -E``, for ``--cpp``.

It runs the program and returns its output, which only ``dprobes.preprocessor`` interprets.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from typing import TYPE_CHECKING

from dprobes.diagnostics import Diagnostic, Severity
from dprobes.errors import SourceError, reason_of
from dprobes.preprocessor.external_preprocessor import ExternalRequest, ExternalResult

if TYPE_CHECKING:
    from dprobes.preprocessor.external_preprocessor import ExternalPreprocessor

__all__ = ["TIMEOUT", "external_preprocessor"]

TIMEOUT = 20
"""Seconds after which the preprocessor is killed."""


def external_preprocessor(command: str) -> ExternalPreprocessor:
    """
    Return a callable that runs ``command`` with ``-D``, ``-I`` and ``-`` appended.

    ``command`` is split into words as a shell does. Raise ``SourceError`` if it is malformed or empty. The callable
    raises ``SourceError`` if the command cannot be run or takes more than ``TIMEOUT`` seconds.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise _failure(f"malformed preprocessor command '{command}': {str(error).lower()}") from error
    if not words:
        raise _failure("the preprocessor command is empty", "give one like '--cpp \"gcc -E\"'")

    def run(request: ExternalRequest) -> ExternalResult:
        import subprocess  # takes 10 ms

        arguments = [f"-D{name}={value}" for name, value in request.defines]
        arguments += [f"-I{directory}" for directory in request.include_dirs]
        try:
            # Standard input is used because compilers take a file with an unknown suffix for an object file.
            with subprocess.Popen(
                [*words, *arguments, "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C"},  # messages are parsed by a program
                start_new_session=True,
            ) as process:
                try:
                    output = process.communicate(request.text.encode(), timeout=TIMEOUT)
                finally:
                    # Descendants of the command may survive and keep its output open, so its whole session is killed.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        except subprocess.TimeoutExpired as error:
            raise _failure(f"'{command}' did not end within {TIMEOUT} seconds") from error
        except (OSError, ValueError) as error:
            raise _failure(f"cannot run '{words[0]}': {reason_of(error)}") from error
        stdout, stderr = (stream.decode("utf-8", "replace") for stream in output)
        return ExternalResult(command, process.returncode, stdout, stderr)

    return run


def _failure(message: str, hint: str | None = None) -> SourceError:
    return SourceError([Diagnostic(Severity.ERROR, message, hint=hint)])

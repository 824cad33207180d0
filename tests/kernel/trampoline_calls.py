"""What tests call in guests to run dprobes on a kernel that has not all that it has."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from unittest import mock

from dprobes.cli.main import run
from dprobes.engines.ebpf.kernel import kernel_features
from dprobes.engines.ebpf.kernel.kernel_features import Feature

__all__ = ["run_without"]


def run_without(missing: tuple[str, ...], *arguments: str) -> tuple[int, str, str]:
    """Run dprobes where trials of some features fail; return its status, and what it has printed."""

    def fail(_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(kernel_features._TRIALS, dict.fromkeys((Feature[name] for name in missing), fail)),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        status = run(arguments)
    return status, output.getvalue(), errors.getvalue()

"""A private systemd-journald, in a mount namespace of its own: the machine's is not touched, and need not be there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from integration.support import TIMEOUT, await_true

__all__ = ["Journald", "entries_of"]

_DAEMONS = ("/lib/systemd/systemd-journald", "/usr/lib/systemd/systemd-journald")

_START = """
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/journal /run/log/journal
printf '%s=%s\\n' Storage volatile Audit no ReadKMsg no RateLimitBurst 0 ForwardToSyslog no > /run/values
(echo '[Journal]'; cat /run/values) > /run/journald.conf
mount --bind /run/journald.conf /etc/systemd/journald.conf
exec "$1"
"""


class Journald:
    """Run systemd-journald; it is reached through ``socket``, and what it has written is in ``journal``."""

    def __init__(self) -> None:
        daemon = next((path for path in _DAEMONS if Path(path).exists()), None)
        if daemon is None or shutil.which("journalctl") is None:
            pytest.skip("systemd-journald is not installed (package systemd)")
        if os.geteuid() != 0:
            pytest.skip("only root can give systemd-journald a mount namespace")
        if not Path("/etc/systemd/journald.conf").exists():
            pytest.skip("there is no journald.conf to be replaced")
        if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False, timeout=TIMEOUT).returncode:
            pytest.skip("this machine does not allow mount namespaces")
        self._process = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", _START, "sh", daemon], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        root = Path(f"/proc/{self._process.pid}/root")
        self.socket = root / "run/systemd/journal/socket"
        self.dev_log = root / "run/systemd/journal/dev-log"
        self.journal = root / "run/log/journal"
        await_true(self._is_there, "systemd-journald")

    def _is_there(self) -> bool:
        if self._process.poll() is not None:
            assert self._process.stderr is not None
            pytest.fail(f"systemd-journald has ended: {self._process.stderr.read().decode()}")
        return self.socket.exists() and self.dev_log.exists() and any(self.journal.glob("*/*.journal"))

    def entries(self, *matches: str) -> list[dict[str, Any]]:
        return entries_of(["-D", str(self.journal)], *matches)

    def await_entries(self, count: int, *matches: str) -> list[dict[str, Any]]:
        await_true(lambda: len(self.entries(*matches)) >= count, f"{count} entries")
        return self.entries(*matches)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(TIMEOUT)
        assert self._process.stderr is not None
        self._process.stderr.close()


def entries_of(where: list[str], *matches: str) -> list[dict[str, Any]]:
    """Return entries as journalctl shows them, whole ones."""
    command = ["journalctl", *where, "--no-pager", "-q", "-a", "-o", "json", *matches]
    done = subprocess.run(command, capture_output=True, check=False, timeout=TIMEOUT, env={**os.environ, "TZ": "UTC"})
    return [json.loads(line) for line in done.stdout.splitlines()]

"""Why there may be no guest is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel import guest, images
from kernel.guest import Guest, UnavailableError

if TYPE_CHECKING:
    from pathlib import Path


def test_without_qemu_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest, "QEMU", "no-such-qemu")
    with pytest.raises(UnavailableError, match=r"^no-such-qemu is not installed \(package qemu-system-x86\)$"):
        Guest("6.1")


def test_a_kernel_that_apt_does_not_know_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(images.KERNELS, "2.4", "linux-image-2.4-cloud-amd64")
    with pytest.raises(UnavailableError) as caught:
        images.vmlinux("2.4")
    assert str(caught.value) in (
        "apt knows no package of a Linux 2.4 kernel (apt-get update may help)",
        "a guest's kernel is a Debian package, and 'apt-get' is not installed",
    )

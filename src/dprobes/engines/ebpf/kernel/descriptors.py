"""Descriptors of kernel objects, owned by somebody who closes them."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Descriptor", "Descriptors"]


class Descriptor:
    """Own a descriptor; leaving the context manager closes it, as often as one likes. A closed one is -1."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def detach(self) -> int:
        """Leave the descriptor to the caller, and return it."""
        fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        """Give up the kernel object."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Descriptors:
    """Own many descriptors, and close them together."""

    def __init__(self, descriptors: Iterable[int] = ()) -> None:
        self._descriptors = list(descriptors)

    def __len__(self) -> int:
        return len(self._descriptors)

    def add(self, fd: int) -> int:
        """Take over a descriptor, and return it."""
        self._descriptors.append(fd)
        return fd

    def detach(self) -> list[int]:
        """Leave the descriptors to the caller."""
        left, self._descriptors = self._descriptors, []
        return left

    def remove(self, fd: int) -> int:
        """Leave one descriptor to the caller, and return it."""
        self._descriptors.remove(fd)
        return fd

    def renew(self, cpu: int) -> None:
        """Attach to a CPU that has come online; there is only something to do for links of single CPUs."""

    def close(self) -> None:
        """Give up the kernel objects, the last one first."""
        while self._descriptors:
            # The kernel frees a descriptor also when close(2) reports an error.
            with suppress(OSError):
                os.close(self._descriptors.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

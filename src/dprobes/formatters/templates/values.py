"""The values that templates take out of records."""

from __future__ import annotations

from dprobes.lazydataclass import dataclass

__all__ = ["Fault", "Value"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Stand for data that could not be read: the address where that failed, or a selector."""

    address: int
    is_selector: bool = False

    def __str__(self) -> str:
        return f"<{'selector ' if self.is_selector else ''}fault at {self.address:#x}>"


Value = int | str | bytes | tuple[int, ...] | Fault | None
"""The value of a field; None says that the data ended before it."""

"""The registers of a thread behind a stub, by their names there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.gdb.description import RegisterPlace, TargetDescription

__all__ = ["Registers"]


class Registers:
    """
    The registers of a stopped thread, from the answer to ``g``; what was set is written back with ``changed``.

    A stub may leave out the last ones there: they are asked for one by one, with ``read``.
    """

    def __init__(
        self,
        description: TargetDescription,
        data: bytes,
        order: Literal["little", "big"],
        read: Callable[[int], bytes | None] | None = None,
    ) -> None:
        self.description = description
        self._places = description.registers
        self._data = bytearray(data)
        self._order = order
        self._read = read
        self._single: dict[str, bytes | None] = {}
        """Registers that were asked for alone, None for those that there are not."""
        self.changed: set[str] = set()

    def copy(self) -> Registers:
        """Return what they are now."""
        made = Registers(self.description, bytes(self._data), self._order, self._read)
        made._single = dict(self._single)
        return made

    def __contains__(self, name: str) -> bool:
        place = self._places.get(name)
        return place is not None and (place.offset + place.size <= len(self._data) or self._alone(place) is not None)

    def _alone(self, place: RegisterPlace) -> bytes | None:
        """Return a register that is not in the answer to ``g``, None if the stub has none such."""
        if place.name not in self._single:
            data = None if self._read is None else self._read(place.number)
            self._single[place.name] = data if data is not None and len(data) == place.size else None
        return self._single[place.name]

    def __getitem__(self, name: str) -> int:
        place = self._places[name]
        if place.offset + place.size > len(self._data):
            return int.from_bytes(self._alone(place) or b"", self._order)
        return int.from_bytes(self._data[place.offset : place.offset + place.size], self._order)

    def value(self, name: str) -> int:
        """Return a register, 0 if there is none of that name."""
        return self[name] if name in self else 0  # noqa: SIM401 - it has no get

    def __setitem__(self, name: str, value: int) -> None:
        place = self._places[name]
        value &= (1 << 8 * place.size) - 1
        self._data[place.offset : place.offset + place.size] = value.to_bytes(place.size, self._order)
        self.changed.add(name)

    def bytes_of(self, name: str) -> bytes:
        """Return a register as it is sent."""
        place = self._places[name]
        return bytes(self._data[place.offset : place.offset + place.size])

    def all_bytes(self) -> bytes:
        """Return all of them as they are sent."""
        return bytes(self._data)

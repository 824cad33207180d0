"""A program of a trace file that is being written: what the file knows of it, and the frames that say the rest."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

from dprobes.errors import SinkError
from dprobes.lazydataclass import dataclass
from dprobes.trace.frames import JSON_MAX, FrameKind, json_frame

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.trace.content import PlaceEntry

__all__ = ["WrittenProgram"]

_FRAME_PLACES = 10_000


@dataclass(slots=True)
class WrittenProgram:
    """A program, and how much of it the file knows; ``lost`` records are to be noted, ``given`` of them by ``lose``."""

    number: int
    name: str
    major: int
    details: dict[str, Any]
    places: list[PlaceEntry] = field(default_factory=list)
    is_announced: bool = False
    announced_places: int = 0
    lost: int = 0
    given: int = 0

    @property
    def is_noted(self) -> bool:
        """Whether the file knows the program and what was lost of it."""
        return self.is_announced and not self.lost

    def frame(self) -> bytes:
        """Return the PROGRAM frame; a ``SinkError`` says that there is too much to say for one."""
        content = {"id": self.number, "name": self.name, "major": self.major, "details": self.details}
        frame = json_frame(FrameKind.PROGRAM, content)
        if len(frame) > JSON_MAX:
            raise SinkError(
                f"what is to be recorded of '{self.name}' takes {len(frame)} bytes, at most {JSON_MAX} are possible",
                hint="most of it are templates",
            )
        return frame

    def place_frames(self) -> Iterator[bytes]:
        """Return the PLACES frames for the probepoints that the file does not know yet."""
        for first in range(self.announced_places, len(self.places), _FRAME_PLACES):
            places = self.places[first : first + _FRAME_PLACES]
            self.announced_places = first + len(places)
            yield json_frame(FrameKind.PLACES, {"id": self.number, "first": first, "places": places})

    def lost_frame(self, now: int) -> bytes:
        """Return the LOST frame for the records that were lost; ``now`` is the monotonic clock in nanoseconds."""
        return json_frame(FrameKind.LOST, {"id": self.number, "count": self.lost, "time": now})

    def take_lost(self) -> tuple[int, int]:
        """Return ``lost`` and ``given``, and count anew."""
        lost = self.lost, self.given
        self.lost = self.given = 0
        return lost

    def forget(self) -> None:
        """Note that the file, which is another one now, knows nothing of the program."""
        self.is_announced, self.announced_places = False, 0

"""What a file is told of a program, and once only."""

from __future__ import annotations

import json

import pytest

from dprobes.errors import SinkError
from dprobes.trace.trace_content import PlaceEntry
from dprobes.trace.trace_frames import JSON_MAX
from dprobes.trace.trace_writer import WrittenProgram


def content_of(frame: bytes) -> dict[str, object]:
    content = json.loads(frame[frame.index(b"{") : frame.rindex(b"}") + 1])
    assert isinstance(content, dict)
    return content


def test_places_are_told_once_and_in_frames_that_are_not_too_large() -> None:
    program = WrittenProgram(3, "p", 7, {}, [PlaceEntry(f"f+{n}") for n in range(10_001)])
    contents = [content_of(frame) for frame in program.place_frames()]
    assert [(content["id"], content["first"]) for content in contents] == [(3, 0), (3, 10_000)]
    assert list(program.place_frames()) == []
    program.places.append(PlaceEntry("g"))
    assert [content_of(frame)["first"] for frame in program.place_frames()] == [10_001]
    program.forget()
    assert [content_of(frame)["first"] for frame in program.place_frames()] == [0, 10_000]


def test_a_program_is_noted_once_the_file_knows_it_and_its_lost_records() -> None:
    program = WrittenProgram(1, "p", 7, {}, lost=5, given=2)
    program.is_announced = True
    assert not program.is_noted
    assert content_of(program.lost_frame(99)) == {"id": 1, "count": 5, "time": 99}
    assert program.take_lost() == (5, 2)
    assert program.is_noted
    assert program.take_lost() == (0, 0)


def test_a_program_with_too_much_to_say_is_refused() -> None:
    program = WrittenProgram(1, "huge", 7, {"templates": "x" * JSON_MAX})
    with pytest.raises(SinkError) as caught:
        program.frame()
    assert str(caught.value) == ("what is to be recorded of 'huge' takes 16777287 bytes, at most 16777216 are possible")
    assert caught.value.hint == "most of it are templates"

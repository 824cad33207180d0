"""What is said of hits that take too much of a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import Notice
from dprobes.engines.overload_guard import OverloadNotices, Verdict
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from dprobes.resolve.probepoints import Probepoint

LESS = "the other hits are counted as skipped; '--overhead off' runs it at each hit"
GONE = "allow more, as in '--overhead 50%', or any overhead with 'off'; or probe a place that is hit less often"


PROGRAM = "name = x\nmajor = 1\n" + "".join(f"offset = f{n}\nminor = {n}\nexit\n" for n in range(10))


def notices(*, at_return: bool = False) -> OverloadNotices:
    program = parse_source(SourceFile("x.rpn", PROGRAM), Diagnostics())
    probes = [
        SimpleNamespace(definition=each, where=f"f{n}", at_return=at_return)
        for n, each in enumerate(program.definitions)
    ]
    return OverloadNotices(0.1, program.major, cast("list[Probepoint]", probes))


def test_a_thinned_handler_is_reported_once() -> None:
    said = notices()
    assert list(said.of(Verdict({3: 8}, (), {3: 0.4321}), {3: 123456.7})) == [
        Notice(
            "1,3 at f3: 123457 hits a second took 43.2% of a CPU, where 10% are allowed: its handler runs at one hit "
            "of 8 from now on",
            LESS,
        )
    ]
    assert list(said.of(Verdict({3: 16}, (), {3: 0.4}), {3: 9.0})) == []
    assert list(said.of(Verdict({3: 4}), {})) == []  # more often again


def test_a_disabled_probepoint_is_reported() -> None:
    assert list(notices().of(Verdict({}, [3], {3: 1.07}), {3: 2e6})) == [
        Notice("1,3 at f3 is disabled: 2000000 hits a second took 100% of a CPU, where 10% are allowed", GONE)
    ]


def test_a_return_is_named_as_such() -> None:
    (notice,) = notices(at_return=True).of(Verdict({}, [3], {3: 0.5}), {3: 10.0})
    assert notice.message.startswith("1,3 at f3 (return) is disabled: ")


def test_of_many_the_worst_are_named() -> None:
    shares = {n: n / 100 for n in range(10)}
    rates = dict.fromkeys(range(10), 50.0)
    thinned = list(notices().of(Verdict(dict.fromkeys(range(10), 2), (), shares), rates))
    assert [each.message.split(":")[0] for each in thinned[:3]] == ["1,9 at f9", "1,8 at f8", "1,7 at f7"]
    assert thinned[3:] == [Notice("the handlers of 7 more probepoints run at some of their hits only", LESS)]
    disabled = list(notices().of(Verdict({}, list(range(10)), shares), rates))
    assert [each.message.split(" is")[0] for each in disabled[:3]] == ["1,9 at f9", "1,8 at f8", "1,7 at f7"]
    assert disabled[3:] == [Notice("7 more probepoints are disabled for the same reason", GONE)]

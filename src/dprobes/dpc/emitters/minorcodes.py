"""
The minor codes of a probe: one for each sequence of ``printf`` that a hit may leave a record with.

Codes of a probe follow each other. Where a handler knows at each ``printf`` what was printed before, sequences that
leave no record have none; else the code is computed at the hit from the number of the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.emitters.faultemitter import fault_sequences, needs_trail
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.dpc.typedtree import typedstatement
    from dprobes.dpc.typedtree.logpaths import LogPaths, Sequence

__all__ = ["MinorCodes", "minor_codes"]


@dataclass(frozen=True, slots=True)
class MinorCodes:
    """
    The codes of a probe as numbers from 0: ``of`` has the sequences that have one.

    ``is_computed`` says that the code is one less than the number of the sequence, which the handler keeps in a cell.
    """

    of: dict[Sequence, int]
    is_computed: bool

    @property
    def count(self) -> int:
        """How many codes the probe takes: one at least, for what is said of it elsewhere."""
        return max(self.of.values(), default=0) + 1


def minor_codes(paths: LogPaths, body: typedstatement.Statement) -> MinorCodes:
    """Return the codes of a handler whose hits take these paths."""
    is_computed = not paths.is_known or needs_trail(paths, body)
    ends = sorted((paths.ends | fault_sequences(paths, body)) - {()}, key=lambda each: (len(each), each))
    if paths.logs == 1:
        return MinorCodes(dict.fromkeys(ends, 0), is_computed)
    if is_computed:
        return MinorCodes({each: paths.number_of(each) - 1 for each in ends}, is_computed)
    return MinorCodes({each: number for number, each in enumerate(ends)}, is_computed)

"""The contents of a PPDF as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.dpc.tool_block import ToolProgram
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.carried_symbols import CarriedBuild
    from dprobes.target.kernel.kernel_symbols import CarriedKernel

__all__ = ["EbpfCode", "EbpfMap", "Ppdf"]


@dataclass(frozen=True, slots=True)
class EbpfMap:
    """A load, at instruction ``index``, of a map's file descriptor, or, with ``is_value``, of an address in the map."""

    index: int
    name: str
    is_value: bool


@dataclass(frozen=True, slots=True)
class EbpfCode:
    """
    eBPF of one handler for one processor and one form of loops. It is for inspection, and never loaded.

    ``code`` has instructions of 8 bytes. ``origins`` has the byte offset of each in the encoded program, or -1.
    ``scratch`` is in bytes. ``problem`` is the reason why there is no code.
    """

    machine: str
    definition: int
    loops: str
    code: bytes = b""
    maps: tuple[EbpfMap, ...] = ()
    origins: tuple[int, ...] = ()
    scratch: int = 0
    sleepable: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Ppdf:
    """
    Compiled program with the facts about the builds of its module, or about the ``kernels`` that it probes.

    ``machines`` has the processors for which the program is encoded, named as in ``arch``. ``needs_write`` is True if
    it changes or stops the target. ``templates`` maps the names of template files to their bytes. ``tool`` is the name
    of the tool that wrote the file. ``companions`` has the programs for other modules that were written with this one:
    they have no companions themselves, and their templates are here. ``blocks`` is the program of the tool for all of
    them.
    """

    program: Program
    machines: tuple[str, ...]
    builds: tuple[CarriedBuild, ...] = ()
    needs_write: bool = False
    templates: Mapping[str, bytes] = field(default_factory=dict)
    ebpf: tuple[EbpfCode, ...] = ()
    tool: str = ""
    kernels: tuple[CarriedKernel, ...] = ()
    companions: tuple[Ppdf, ...] = ()
    blocks: ToolProgram | None = None

    @property
    def members(self) -> tuple[Ppdf, ...]:
        """This program and its companions."""
        return (self, *self.companions)

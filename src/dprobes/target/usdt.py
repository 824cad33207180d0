r"""
USDT probes: places that <sys/sdt.h> marks in a program's code, from the notes of its file.

A note of the type 3 and the owner ``stapsdt`` in the section ``.note.stapsdt`` describes one place (SystemTap's wiki
page "UserSpaceProbeImplementation")::

    word  the address of the place, a nop
    word  the address of the section .stapsdt.base when the file was linked
    word  the address of the probe's semaphore, 0 if it has none: 16 bits that count the users of the probe
    provider \0 name \0 arguments \0

A tool that moves a file's sections later (prelink) changes the address of ``.stapsdt.base`` in its header, but not the
notes. So the difference must be added to the addresses. The semaphore is in its own section, ``.probes``.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from dprobes.arch import ARCHITECTURE_NAMES, architecture
from dprobes.arch.usdt_arguments import parse_arguments
from dprobes.diagnostics import near_names
from dprobes.globs import compile_glob, is_pattern
from dprobes.target.elf.elf_headers import notes_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.arch.usdt_arguments import Argument
    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["UsdtSite", "guarded_site", "is_semaphore", "matching_sites", "near_probes", "usdt_sites"]

_SECTION, _BASE_SECTION = ".note.stapsdt", ".stapsdt.base"
_OWNER, _TYPE = b"stapsdt\0", 3

_PF_W = 2
"""Flag of writable segments."""

_SITES_MAX = 1 << 16
"""Maximum number of notes that are read of a file: the largest programs have some thousands."""

_NAME_MAX = 256
"""Maximum number of characters of a provider or a name."""

_NEAR = 3


class UsdtSite(NamedTuple):
    """
    Place of a USDT probe in a file, from its ``stapsdt`` note.

    ``address`` is its link address. ``offset`` is its file offset, or None if the file has no code there. ``semaphore``
    is the link address of the probe's semaphore, or 0. ``counter`` is the semaphore's file offset, or 0 if it is not in
    the file. ``described`` is the note's text about the arguments.
    """

    provider: str
    name: str
    address: int
    offset: int | None
    semaphore: int
    counter: int
    arguments: tuple[Argument, ...]
    described: str

    @property
    def probe(self) -> str:
        """Provider and name, as after ``usdt:``."""
        return f"{self.provider}:{self.name}"


def usdt_sites(elf: ElfFile) -> tuple[UsdtSite, ...]:
    """Return the places of a file's USDT probes in the order of its notes. Malformed notes are skipped."""
    return _sites_of(elf)


@lru_cache(maxsize=8)
def _sites_of(elf: ElfFile) -> tuple[UsdtSite, ...]:
    if elf.machine not in ARCHITECTURE_NAMES:
        return ()
    base = next((section.address for section in elf.sections if section.name == _BASE_SECTION), None)
    found: list[UsdtSite] = []
    for section in elf.sections:
        if section.name == _SECTION and section.in_file:
            data = elf.bytes_at(section.offset, section.size, f"the section {_SECTION}")
            found += _sites_in(elf, data, base)
    return tuple(found[:_SITES_MAX])


def _sites_in(elf: ElfFile, data: bytes, base: int | None) -> Iterator[UsdtSite]:
    words = struct.Struct(f"{elf.struct_prefix}3{'Q' if elf.word_size == 8 else 'I'}")
    for kind, owner, description in islice(notes_in(data, elf.struct_prefix), _SITES_MAX):
        if kind != _TYPE or owner != _OWNER or len(description) < words.size:
            continue
        address, linked_base, semaphore = words.unpack_from(description)
        strings = description[words.size :].split(b"\0")
        if len(strings) >= 3 and all(strings[:2]) and max(map(len, strings[:2])) <= _NAME_MAX:
            moved = base - linked_base if base is not None and linked_base else 0
            yield _site(elf, address + moved, semaphore + moved if semaphore else 0, strings)


def is_semaphore(elf: ElfFile, address: int) -> bool:
    """Return whether the two bytes of a semaphore at a link address are in a writable segment."""
    return any(s.flags & _PF_W and 0 <= address - s.vaddr < s.memsz - 1 for s in elf.load_segments)


def _site(elf: ElfFile, address: int, semaphore: int, strings: Sequence[bytes]) -> UsdtSite:
    provider, name, described = (text.decode("utf-8", "surrogateescape") for text in strings[:3])
    offset = elf.file_offset(address)
    semaphore = semaphore if is_semaphore(elf, semaphore) else 0
    return UsdtSite(
        provider,
        name,
        address,
        offset if offset is not None and elf.is_executable_offset(offset) else None,
        semaphore,
        (elf.file_offset(semaphore) or 0) if semaphore else 0,
        parse_arguments(described, architecture(elf.machine)),
        described,
    )


def guarded_site(elf: ElfFile, offset: int) -> UsdtSite | None:
    """
    Return the USDT site with a semaphore at a file offset, which may be executed only while the semaphore is not 0.

    Return None if there is no such site.
    """
    return next((site for site in usdt_sites(elf) if site.offset == offset and site.semaphore), None)


def matching_sites(elf: ElfFile, provider: str, name: str) -> list[UsdtSite]:
    """Return the sites whose provider and name are equal to these, or match them as shell patterns."""
    providers, names = (compile_glob(text).match if is_pattern(text) else text.__eq__ for text in (provider, name))
    return [site for site in usdt_sites(elf) if providers(site.provider) and names(site.name)]


def near_probes(elf: ElfFile, provider: str, name: str) -> list[str]:
    """Return up to three probes (``PROVIDER:NAME``) of a file with similar names, the nearest first."""
    probes = list(dict.fromkeys(site.probe for site in usdt_sites(elf)))
    plain = name.replace("-", "__").lower()
    names = {probe: probe.partition(":")[2] for probe in probes}
    same = [probe for probe in probes if names[probe].lower() in (plain, name.lower())]
    near = near_names(plain, names.values(), _NEAR)
    likely = [probe for each in near for probe in probes if names[probe] == each]
    likely.sort(key=lambda probe: probe.partition(":")[0] != provider)
    return list(dict.fromkeys([*same, *likely]))[:_NEAR]

"""The identity of a module's build: the build-id, or a hash of the code."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dprobes.target.elf.file import ElfFile

__all__ = ["CODE_PREFIX", "module_identity"]

CODE_PREFIX = "code-"
"""What an identity begins with that is not a build-id."""

_HEADER_SIZES = {4: 52, 8: 64}
"""Sizes in bytes of the ELF header; it may lie in a code segment, and strip changes it."""

_DIGEST_SIZE = 20


def module_identity(elf: ElfFile) -> str:
    """
    Return what is the same in a module and its stripped copy, and differs in every other build of it.

    That is the build-id in hex. For a file that was linked without one it is CODE_PREFIX and a hash of its code.
    """
    if elf.build_id:
        return elf.build_id
    import hashlib

    digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    for segment in elf.load_segments:
        if segment.executable:
            start = max(segment.offset, _HEADER_SIZES[elf.word_size])
            digest.update(segment.vaddr.to_bytes(8, "little") + segment.filesz.to_bytes(8, "little"))
            digest.update(elf.data[start : segment.offset + segment.filesz])
    return CODE_PREFIX + digest.hexdigest()

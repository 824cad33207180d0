"""The build-ids of what runs: the kernel's own, and those of the modules that are loaded."""

from __future__ import annotations

from pathlib import Path

from dprobes.errors import TargetError, reason_of

__all__ = ["KERNEL_NOTES", "build_id_in", "build_id_of_notes", "running_build_id"]

KERNEL_NOTES = Path("/sys/kernel/notes")
_MODULE_NOTES = "/sys/module/{}/notes/.note.gnu.build-id"

# Elf64_Nhdr: u32 namesz, descsz, type, then the name and the description, each padded to four bytes
_GNU_BUILD_ID = b"\x03\0\0\0GNU\0"


def running_build_id(module: str) -> str:
    """Return the build-id, in hex, of a module that is loaded, or of the kernel (""); raise ``TargetError`` if none."""
    return build_id_of_notes(Path(_MODULE_NOTES.format(module)) if module else KERNEL_NOTES)


def build_id_of_notes(path: Path) -> str:
    """Return the build-id, in hex, that a file of notes has; raise ``TargetError`` if it has none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TargetError(f"the build-id cannot be read: {path}: {reason_of(error)}") from error
    if (found := build_id_in(data)) is None:
        raise TargetError(f"there is no build-id in {path}")
    return found


def build_id_in(notes: bytes) -> str | None:
    """Return the build-id, in hex, that is among some notes; None if there is none."""
    start = notes.find(_GNU_BUILD_ID)
    if start < 4:
        return None
    size = int.from_bytes(notes[start - 4 : start], "little")
    description = start + len(_GNU_BUILD_ID)
    return notes[description : description + size].hex()

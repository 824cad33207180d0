"""
Search for the file that ``name = …`` of a probe program denotes.

A name with a slash is a path. Any other name is searched in the process, in the command to be started, in the dynamic
loader's directories, and in ``PATH``. The first match counts. Architectures are named as in ``ElfFile.machine``.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import near_names
from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.file_contents import READ_LIMIT, file_contents, file_head
from dprobes.target.process_maps import code_mappings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from dprobes.target.process_maps import Mapping

__all__ = [
    "CachedLibrary",
    "advice_on_name",
    "executable_of",
    "find_module",
    "has_soname",
    "held_files",
    "host_architecture",
    "is_file_of",
    "is_library_for",
    "is_made_by_kernel",
    "matches",
    "module_name",
    "near_modules",
    "parse_ld_cache",
    "read_ld_cache",
    "replaced_file",
    "root_of",
    "searched_directories",
    "suggestion",
    "usual_architecture",
]

_TRIPLETS = {
    "x86_64": "x86_64-linux-gnu",
    "i386": "i386-linux-gnu",
    "aarch64": "aarch64-linux-gnu",
    "ppc64": "powerpc64le-linux-gnu",
    "s390x": "s390x-linux-gnu",
}
_CROSS_TRIPLETS = {
    "aarch64": "aarch64-linux-gnu",
    "ppc": "powerpc-linux-gnu",
    "ppc64": "powerpc64-linux-gnu",
    "riscv64": "riscv64-linux-gnu",
    "s390x": "s390x-linux-gnu",
}
"""Directories of Debian's cross compilers with libraries for processors that run here only under an emulator."""
_IDENTITY = {"i386": (1, 3), "x86_64": (2, 62), "aarch64": (2, 183), "ppc64": (2, 21), "s390x": (2, 22)}
_MADE_BY_KERNEL = frozenset(
    ("[vdso]", "[vsyscall]", "linux-vdso.so.1", "linux-vdso32.so.1", "linux-vdso64.so.1", "linux-gate.so.1")
)
"""Names of code that the kernel maps into every process (vdso(7))."""

_NEAR = 3
_CANDIDATES = 12
"""Maximum number of programs with a similar name that are checked, as many may be scripts."""

_NAME_MAX = 255  # bytes of a file's name


def find_module(
    name: str, *, pid: int | None = None, command: str | None = None, architecture: str | None = None
) -> Path | None:
    """
    Return the file that ``name`` denotes, with symbolic links followed, or None if this machine has none.

    ``pid`` is a process whose mapped files come first. ``command`` is a program to be started with the environment of
    this process. ``architecture`` selects among libraries of the same name. The default is the architecture of the
    process or program, or else of the machine.
    """
    if "\0" in name or not name or any(len(part) > _NAME_MAX for part in os.fsencode(name).split(b"/")):
        return None
    if "/" in name:
        return _named_by_path(name, pid)
    if pid is not None and (mapped := _mapped(name, pid)) is not None:
        return mapped
    if command is not None and (program := _command_named(name, command)) is not None:
        return program
    wanted = architecture or usual_architecture(pid, command)
    for path in (*_candidates_of_command(name, command), *_library_candidates(name, wanted)):
        if is_library_for(path, wanted):
            return path.resolve()
    return _program_in_path(name)


def is_mapped(name: str, pid: int) -> bool:
    """Return True if a process maps code of the file that ``name`` denotes, and False if the process has ended."""
    try:
        return _mapped(name, pid) is not None
    except TargetError:
        return False


def usual_architecture(pid: int | None, command: str | None) -> str:
    """Return the architecture of a process or of a program to be started, or of the machine if neither is given."""
    program = None
    if pid is not None:
        program = Path(f"/proc/{pid}/exe")
    elif command is not None:
        program = executable_of(command)
    host = host_architecture()
    if host == "x86_64" and program is not None and is_library_for(program, "i386"):
        return "i386"
    return host


def is_made_by_kernel(name: str) -> bool:
    """Return whether a name means code that the kernel maps into every process, without a file."""
    return name in _MADE_BY_KERNEL


def matches(name: str, path: str | os.PathLike[str], soname: str | None) -> bool:
    """
    Return True if ``name`` denotes the file ``path`` whose ``DT_SONAME`` is ``soname``.

    ``name`` may be the file's path, base name or SONAME, or the name of a symbolic link to the file in the same
    directory.
    """
    path = os.fspath(path)
    if "/" in name:
        return name == path or _same_file(name, path)
    directory, _, base = path.rpartition("/")
    if name in (base, soname):
        return True
    link = f"{directory}/{name}"
    return os.path.islink(link) and _same_file(link, path)  # noqa: PTH114 - called for every mapping of a process


def is_file_of(path: Path, name: str) -> bool:
    """Return whether ``name`` means the file ``path``, by its path, base name, symbolic links or SONAME."""
    try:
        soname = ElfFile.open(path).soname
    except TargetError:
        soname = None
    return matches(name, path, soname)


def has_soname(path: Path, name: str) -> bool:
    """Return True if ``name`` is the ``DT_SONAME`` of a file, and False if the file cannot be read."""
    try:
        data = file_contents(path, "a mapped file")
        # Most files do not contain the name; only the others, and files that are long to search, are parsed.
        if len(data) <= READ_LIMIT and data.find(os.fsencode(name) + b"\0") < 0:
            return False
        return ElfFile.of_bytes(path, data).soname == name
    except TargetError:
        return False


def near_modules(name: str, *, pid: int | None = None, command: str | None = None) -> list[str]:
    """Return up to three names of modules that are similar to ``name``, the nearest first."""
    known: dict[str, None] = {}
    if pid is not None:
        known.update(dict.fromkeys(Path(m.path).name for m in _code_of(pid)))
    if command is not None:
        known[Path(command).name] = None
    known.update(dict.fromkeys(library.name for library in read_ld_cache()))
    base = Path(name).name
    near = _alike(base, known)
    if len(near) < _NEAR:
        running = dict.fromkeys(_running_programs())
        programs = _alike(base, {**running, **dict.fromkeys(_programs_in_path())}, _CANDIDATES)
        near += [each for each in programs if each not in near and (each in running or find_module(each) is not None)]
    return near[:_NEAR]


def suggestion(name: str, *, pid: int | None = None, command: str | None = None) -> str | None:
    """Return a question "did you mean …" with the modules that are similar to ``name``, or None if there are none."""
    near = [repr(each) for each in near_modules(name, pid=pid, command=command)]
    if not near:
        return None
    return f"did you mean {', '.join(near[:-1])} or {near[-1]}?" if len(near) > 1 else f"did you mean {near[0]}?"


def advice_on_name(name: str, mapped: dict[str, str]) -> str | None:
    """
    Return a hint about a module name that no process maps, or None if there is none.

    ``mapped`` has the paths of the mapped files by base name.
    """
    if "/" in name and not name.startswith("/"):
        return f"a relative path is taken from the current directory: '{name}' is '{Path(name).absolute()}'"
    base = Path(name).name
    if "/" in name and base in mapped and mapped[base] != name:
        return f"processes mapped '{mapped[base]}': is that the intended one?"
    like = _alike(base, mapped)
    if like:
        return f"processes mapped {', '.join(repr(mapped[other]) for other in like)}: is one of them the intended one?"
    if "/" in name:
        return None
    if _is_file(Path(name)):
        return f"a name without '/' is not looked for in the current directory: write name = \"./{name}\""
    return None


def _alike(base: str, known: Collection[str], count: int = _NEAR) -> list[str]:
    starts = (f"{base}.so", f"lib{base}.so", f"{base}-", f"lib{base}-")
    near = sorted((n for n in known if n.startswith(starts)), key=lambda n: (not n.startswith(starts[:2]), len(n), n))
    near += [n for n in near_names(base, known, count, cutoff=0.75) if n not in near]
    return [n for n in near if n != base][:count]


def _named_by_path(name: str, pid: int | None) -> Path | None:
    path = Path(name)
    if pid is not None:
        # A link of /proc, such as /proc/PID/root, leads to the path that the process uses.
        wanted, code = {str(path.absolute()), os.path.realpath(path)}, []
        with contextlib.suppress(TargetError):  # the process is gone, or may not be inspected
            code = [mapping for mapping in _code_of(pid) if mapping.path in wanted]
        if code and all(mapping.deleted for mapping in code):
            return _held_file(code[0], pid)
        if path.is_absolute():
            path = Path(root_of(pid) + name)
    return _resolved(path) if _is_file(path) else None


def _is_file(path: Path) -> bool:
    """Return True if a path leads to a regular file, and False if it is too long or not accessible."""
    try:
        return path.is_file()
    except OSError:
        return False


def _mapped(name: str, pid: int) -> Path | None:
    """
    Return the file that ``name`` denotes among the files whose code a process has mapped.

    Return None if there is none.
    """
    root = root_of(pid)
    code = _code_of(pid)
    found = next((m for m in code if matches(name, root + m.path, None)), None)
    if found is None:
        found = _mapped_through_path(name, code) or _mapped_by_soname(name, code, root, pid)
    if found is None:
        return None
    if not found.deleted:
        return _resolved(Path(root + found.path))
    return _held_file(found, pid)


def _held_file(mapping: Mapping, pid: int) -> Path:
    """
    Return a path in /proc to a mapped file that was removed or replaced.

    Raise ``TargetError`` if none leads there.
    """
    for path in held_files(mapping, pid):
        if _inode(path) == mapping.inode:
            return path
    raise replaced_file(mapping.path, pid)


def held_files(mapping: Mapping, pid: int) -> tuple[Path, Path]:
    """Return paths in /proc that may lead to a file that a process has mapped, even if it was removed or replaced."""
    # The kernel shows the second one to root, or with CAP_CHECKPOINT_RESTORE.
    return Path(f"/proc/{pid}/exe"), Path(f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}")


def replaced_file(path: str, pid: int) -> TargetError:
    """Return the error for a file that a process has mapped, but that was replaced at its path or removed."""
    return TargetError(
        f"MISMATCH: '{path}' was replaced or removed while process {pid} uses it",
        hint="run dprobes as root, which can read the mapped file, or restart the process",
    )


def _code_of(pid: int) -> list[Mapping]:
    """Return the first executable mapping of each file that a process has mapped."""
    first: dict[tuple[str, int], Mapping] = {}
    for mapping in code_mappings(pid)[0]:
        first.setdefault((mapping.path, mapping.inode), mapping)
    return list(first.values())


def _mapped_through_path(name: str, code: list[Mapping]) -> Mapping | None:
    """Return the mapped file to which a command's name leads, as ``java`` does through several links, or None."""
    import shutil

    program = shutil.which(name)
    if program is None:
        return None
    real = os.path.realpath(program)
    return next((m for m in code if m.path == real and not m.deleted), None)


def _mapped_by_soname(name: str, code: list[Mapping], root: str, pid: int) -> Mapping | None:
    for mapping in code:
        with contextlib.suppress(TargetError):
            path = _held_file(mapping, pid) if mapping.deleted else Path(root + mapping.path)
            if has_soname(path, name):
                return mapping
    return None


def _command_named(name: str, command: str) -> Path | None:
    """Return the command's executable if ``name`` is its given name, a link's, or the real file's, or else None."""
    import shutil

    program = executable_of(command)
    names = {program.name}
    link = shutil.which(command) or command
    while _same_file(link, program):  # a name of a script does not count, because its interpreter is executed
        names.add(Path(link).name)
        if not Path(link).is_symlink():
            break
        link = os.path.join(os.path.dirname(link), os.readlink(link))  # noqa: PTH115, PTH118, PTH120 - links by text
    return program if name in names or matches(name, program, None) else None


def _program_in_path(name: str) -> Path | None:
    """Return the first program with a name in ``PATH``, or None if there is none. Wrapper scripts are skipped."""
    for directory in os.get_exec_path():
        path = Path(directory or ".", name)
        if os.access(path, os.X_OK) and _is_elf(path):
            return path.resolve()
    return None


def _programs_in_path() -> Iterator[str]:
    """Iterate over the names of the files in the directories of ``PATH``."""
    for directory in os.get_exec_path():
        with contextlib.suppress(OSError):
            yield from (path.name for path in Path(directory or ".").iterdir())


def _running_programs() -> Iterator[str]:
    """Iterate over the names of the programs that visible processes execute."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                yield (process / "exe").readlink().name.removesuffix(" (deleted)")


def _is_elf(path: Path) -> bool:
    try:
        return bytes(file_head(path, 4)) == b"\x7fELF"
    except TargetError:
        return False


def searched_directories(elf: ElfFile) -> Iterator[Path]:
    """
    Iterate over the directories that the dynamic loader searches first for the libraries of a file (ld.so(8)).

    They come from the file itself and, for a program that dprobes starts, from LD_LIBRARY_PATH.
    """
    own, origin = elf.dynamic.run_path, str(elf.path.parent)
    text = os.environ.get("LD_LIBRARY_PATH", "")
    given = text.replace(";", ":").split(":") if text else ()
    for directory in (*own, *given) if elf.dynamic.is_run_path_first else (*given, *own):
        yield Path(directory.replace("${ORIGIN}", origin).replace("$ORIGIN", origin))  # an empty one is the current


def _candidates_of_command(name: str, command: str | None) -> Iterator[Path]:
    """Iterate over the paths of a library in the directories that are searched for a command."""
    if command is not None:
        with contextlib.suppress(TargetError):
            yield from (directory / name for directory in searched_directories(ElfFile.open(executable_of(command))))


def _library_candidates(name: str, architecture: str) -> Iterator[Path]:

    libraries = [x for x in read_ld_cache() if x.name == name and x.architecture == architecture]
    for library in sorted(libraries, key=lambda x: x.hardware_specific):
        yield Path(library.path)
    triplet = _TRIPLETS.get(architecture, architecture)
    wide = "lib32" if architecture == "i386" else "lib64"
    for directory in (f"lib/{triplet}", wide, "lib"):
        yield Path("/", directory, name)
        yield Path("/usr", directory, name)
    yield Path("/usr/local/lib", name)
    if (cross := _CROSS_TRIPLETS.get(architecture)) is not None:
        yield Path("/usr", cross, "lib", name)


def is_library_for(path: Path, architecture: str) -> bool:
    """Return True if a file is an ELF file for an architecture. An unknown architecture accepts every ELF file."""
    if not path.is_file():
        return False
    try:
        head = file_head(path, 20)
    except TargetError:
        return False
    if len(head) < 20 or head[:4] != b"\x7fELF":
        return False
    machine = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    return _IDENTITY.get(architecture, (head[4], machine)) == (head[4], machine)


def root_of(pid: int) -> str:
    """Return ``/proc/PID/root`` for a process in another mount namespace, and "" for any other."""
    try:
        own, other = (os.readlink(f"/proc/{who}/ns/mnt") for who in ("self", pid))  # noqa: PTH115 - of each process
    except OSError:
        return ""
    return "" if own == other else f"/proc/{pid}/root"


def _resolved(path: Path) -> Path:
    # The kernel follows /proc/PID/root in a way that cannot be written as another path.
    return path if path.parts[:2] == ("/", "proc") else path.resolve()


def _same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samefile(one, other)  # noqa: PTH121 - either may be text
    except (OSError, ValueError):
        return False


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def module_name(path: str, soname: str | None, known: Iterable[str], root: str = "") -> str:
    """
    Return the name of a mapped file that all output has.

    It is the first of the ``known`` names, from probe programs and commands, that denotes the file: 'redis-server' may
    be a link to the mapped file. If there is none, it is the SONAME or the file's base name. ``root`` is the prefix of
    paths of a process in another mount namespace.
    """
    for name in known:
        if name and matches(name, root + path, soname):
            return name.rpartition("/")[2]
    return soname if soname and "/" not in soname else path.rpartition("/")[2] or path


# The dynamic loader's cache, ``/etc/ld.so.cache``, which maps names of libraries to files.
# Its format is ``glibc-ld.so.cache1.1``, which may follow the older table that some systems still write before it.
# Rules: glibc, ``sysdeps/generic/dl-cache.h`` and ``ldconfig.h``.


LD_CACHE = Path("/etc/ld.so.cache")
"""Path of the cache that ldconfig writes."""

_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = struct.Struct("=20sII20x")  # magic, number of entries, size of strings, flags and extensions
_ENTRY = struct.Struct("=iIIIQ")  # flags, offset of name, offset of path, OS version, hardware capabilities
_FLAG_ELF = 0xFF  # the low byte is the libc: 3 for glibc 2
_ELF_LIBC6 = 3
_ARCHITECTURES = {0x0000: "i386", 0x0300: "x86_64", 0x0400: "s390x", 0x0500: "ppc64", 0x0A00: "aarch64"}
_HOSTS = {"i486": "i386", "i586": "i386", "i686": "i386", "ppc64le": "ppc64", "arm64": "aarch64"}


class CachedLibrary(NamedTuple):
    """File that programs for an architecture load as the library ``name``."""

    name: str
    path: str
    architecture: str
    hardware_specific: bool


def host_architecture() -> str:
    """Return the architecture of this machine, named as in ``ElfFile.machine``."""
    machine = os.uname().machine
    return _HOSTS.get(machine, machine)


def parse_ld_cache(data: bytes) -> list[CachedLibrary]:
    """Return the libraries in a cache file, in its order. The list is empty if the file has another format."""
    start = data.find(_MAGIC)
    if start < 0 or len(data) < start + _HEADER.size:
        return []
    _, count, _ = _HEADER.unpack_from(data, start)
    entries = data[start + _HEADER.size : start + _HEADER.size + count * _ENTRY.size]
    whole = memoryview(entries)[: len(entries) - len(entries) % _ENTRY.size]
    found = []
    for flags, name, path, _, hardware in _ENTRY.iter_unpack(whole):
        # On i386 the entries of 32-bit glibc have no architecture bits at all; foreign ones are left out.
        architecture = _ARCHITECTURES.get(flags & 0xFF00)
        if flags & _FLAG_ELF == _ELF_LIBC6 and architecture is not None:
            library = CachedLibrary(
                _string(data, start + name), _string(data, start + path), architecture, hardware != 0
            )
            if library.name and library.path.startswith("/"):
                found.append(library)
    return found


def read_ld_cache(path: Path = LD_CACHE) -> list[CachedLibrary]:
    """Return the libraries in a cache file. The list is empty if the file cannot be read."""
    try:
        return parse_ld_cache(file_contents(path, "the dynamic loader's cache")[:])
    except TargetError:
        return []


def _string(data: bytes, offset: int) -> str:
    end = data.find(b"\0", offset)
    return data[offset:end].decode("utf-8", "surrogateescape") if end >= 0 else ""


_SCRIPT_LINE = 256  # bytes: BINPRM_BUF_SIZE
_MAX_SCRIPTS = 5  # scripts that are each other's interpreters


def executable_of(command: str | os.PathLike[str]) -> Path:
    """
    Return the file that is executed when ``command`` is started, with symbolic links followed.

    For a script, it is the script's interpreter; for ``#!/usr/bin/env NAME``, it is the program that ``env`` starts.
    Raise ``TargetError`` if a file is not found, or is not executable.
    """
    name = os.fspath(command)
    path = _find(name)
    for _ in range(_MAX_SCRIPTS):
        interpreter = _interpreter(path)
        if interpreter is None:
            return path.resolve()
        try:
            path = _find(interpreter)
        except TargetError as e:
            raise TargetError(f"the interpreter of '{path}' cannot be run: {e.message}", hint=e.hint) from e
    raise TargetError(f"'{name}' cannot be run: its interpreters are scripts, more than {_MAX_SCRIPTS} deep")


def _find(name: str) -> Path:
    if not name or "\0" in name:
        raise TargetError(f"command {name!r} is not a file name")
    if "/" not in name:
        import shutil

        found = shutil.which(name)
        if found is None:
            raise TargetError(f"command '{name}' is not found", hint="write its path, or add its directory to PATH")
        return Path(found)
    path = Path(name)
    try:
        if path.is_dir():
            raise TargetError(f"'{name}' is a directory, expected a program")
        if not path.exists():
            raise TargetError(f"'{name}' does not exist")
    except PermissionError as e:
        raise TargetError(f"'{name}' cannot be run: permission denied") from e
    if not os.access(path, os.X_OK):
        raise TargetError(f"'{name}' is not executable", hint=f"allow it with chmod +x {name}")
    return path


def _interpreter(path: Path) -> str | None:
    """Return the program that the ``#!`` line of a script starts, or None for a file that is not a script."""
    try:
        head = file_head(path, _SCRIPT_LINE)
    except TargetError:
        return None  # a program may be executable without being readable
    if not head.startswith(b"#!"):
        return None
    words = os.fsdecode(head[2:].partition(b"\n")[0]).strip(" \t").split(None, 1)
    if not words:
        raise TargetError(f"'{path}' names no interpreter after '#!'")
    if os.path.basename(words[0]) != "env" or len(words) == 1:  # noqa: PTH119 - text, not a path to look at
        return words[0]
    return _started_by_env(words[1]) or words[0]


def _started_by_env(arguments: str) -> str | None:
    """
    Return the program that ``env`` starts, or None if it starts none.

    A script has one argument, which ``-S`` splits into words.
    """
    words = arguments.split()
    if words[0].startswith(("-S", "--split-string")):
        words[0] = words[0].removeprefix("-S").removeprefix("--split-string").removeprefix("=")
        return next((word for word in words if word and not word.startswith("-") and "=" not in word), None)
    return arguments.strip()

"""The verb ``patch``: replace a function of a running process by one of a shared object."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.cli.console import Progress, print_line, print_table
from dprobes.cli.shared_options import PROCESS_ID
from dprobes.errors import DprobesError, TargetError, reason_of
from dprobes.escapes import escaped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ptrace.patching.live_patches import PlannedPatch
    from dprobes.engines.ptrace.patching.patch_records import PatchRecord, PatchState
    from dprobes.engines.ptrace.patching.patched_processes import PatchedProcesses

__all__ = ["patch_command"]

_PATCH = re.compile(r"(?P<path>.+?):(?P<symbol>[^:=]+)(?:=(?P<function>.+))?")
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@click.command("patch")
@click.argument("patch", metavar="OBJECT:SYMBOL[=FUNCTION]", required=False)
@click.option("-p", "--pid", type=PROCESS_ID, help="The process whose function is replaced.")
@click.option("--everywhere", is_flag=True, help="All processes that map the module, also those that start later.")
@click.option("--allow-write", is_flag=True, help="Allow changes of the process; required, except with --list.")
@click.option(
    "--build-id",
    metavar="HEX",
    help="Refuse a module with another build-id. Default: the one in the object's section .dprobes.build-id.",
)
@click.option(
    "--when-idle",
    "idle",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Wait until no thread has a frame in the function, and fail after this time.",
)
@click.option(
    "--replace",
    "replaces",
    is_flag=True,
    help="Let orig_NAME be the original function, although it is patched already.",
)
@click.option("--persist", is_flag=True, help="Return after the insertion, and leave the patch in the process.")
@click.option("--list", "lists", is_flag=True, help="List the patches of the process.")
@click.option(
    "--remove",
    "removes",
    is_flag=True,
    help="Remove all patches of the process, or those of the argument: a FUNCTION, or a PATCH as in --list.",
)
def patch_command(
    patch: str | None,
    pid: int | None,
    everywhere: bool,
    allow_write: bool,
    build_id: str | None,
    idle: float | None,
    replaces: bool,
    persist: bool,
    lists: bool,
    removes: bool,
) -> int:
    """
    Replace a function of a running process by the function SYMBOL of the shared object OBJECT.

    FUNCTION is the replaced function, by default the one called SYMBOL: a symbol, FILE.c:SYMBOL for one of several
    static functions, or MODULE:SYMBOL for a function of a library. The object calls the replaced function as orig_NAME.
    It is compiled with gcc -shared -fPIC -nostartfiles.

    If the function is patched already, orig_NAME is the former patch, or with --replace the original function.

    Ctrl-C restores the function. With --persist the patch stays, and --remove restores the function.
    """
    if lists and removes:
        raise click.UsageError("--list and --remove exclude each other")
    if (pid is None) != everywhere:
        message = "name a process (-p PID), or patch all processes that map the module (--everywhere)"
        raise click.UsageError(message)
    if lists or removes:
        _refuse_ignored("--list" if lists else "--remove", patch if lists else None, build_id, idle, replaces, persist)
    if lists:
        return _list(pid)
    if not allow_write:
        raise click.UsageError("a patch changes the code of the process: allow it with --allow-write")
    if removes:
        return _remove(pid, patch)
    if patch is None or (found := _PATCH.fullmatch(patch)) is None:
        raise click.UsageError("expected OBJECT:SYMBOL[=FUNCTION], such as ./fix.so:parse=parse_header")
    if pid is None:
        return _patch_everywhere(found, build_id, idle, replaces=replaces, persist=persist)
    from dprobes.engines.ptrace.patching.live_patches import description_of, insert_patch, plan_patch, remove_patch

    with Progress("reading the program's symbols"):
        planned = plan_patch(pid, Path(found["path"]), found["symbol"], found["function"], build_id, replaces=replaces)
    _warn(planned, build_id)
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    with _handle_of(pid) as process:
        inserted = insert_patch(planned, idle=idle, pause=_pause)
        try:
            print_line(description_of(planned, inserted))
            if persist:
                return 0
            console.write("Ctrl-C restores the function")
            has_ended = _await_end(process)
        except BaseException:  # such as that of an output whose reader has gone
            if not persist:
                remove_patch(pid, inserted.record)
            raise
    if has_ended:
        console.write(f"process {pid} has ended")
        return 0
    return 0 if _restore(pid, inserted.record) else 1


@contextlib.contextmanager
def _handle_of(pid: int) -> Iterator[int]:
    """Open a descriptor of a process, which is readable when the process has ended."""
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        raise TargetError(f"{pid} is not the id of a process: {reason_of(error)}") from error
    try:
        yield process
    finally:
        os.close(process)


def _pause(seconds: float) -> None:
    """Sleep between two stops; only then can the signals of ``_ENDING`` end the run."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    time.sleep(seconds)
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)


def _warn(planned: PlannedPatch, build_id: str | None) -> None:
    from dprobes.engines.ptrace.patching.live_patches import inlined_text

    if build_id is None and planned.object.wanted_build_id is None:
        console.note(
            f"'{planned.object.path}' names no build-id, so '{planned.module.name}' may be another build",
            hint=f"--build-id {planned.module.elf.build_id}" if planned.module.elf.build_id else None,
        )
    for text in (inlined_text(planned), planned.doubt):
        if text is not None:
            console.warning(text)


# All processes that map a module

_LOOK = 1.0
"""Seconds between two searches for new processes."""


def _patch_everywhere(
    found: re.Match[str], build_id: str | None, idle: float | None, *, replaces: bool, persist: bool
) -> int:
    from dprobes.engines.ptrace.patching.patched_processes import PatchedProcesses

    module, _, name = (found["function"] or "").partition(":")
    if not module or not name:
        raise click.UsageError("--everywhere needs the module of the function: OBJECT:SYMBOL=MODULE:FUNCTION")
    path, symbol = Path(found["path"]), found["symbol"]
    processes = PatchedProcesses(path, symbol, module, name, build_id, replaces=replaces, idle=idle)
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    is_kept = False
    try:
        is_complete = _tell(processes)
        if processes.closed:
            count = f"{processes.closed} process{'es' * (processes.closed > 1)}"
            message = f"the mappings of {count} cannot be read: they are not patched, whatever they map"
            console.note(message, hint="run dprobes as root" if os.geteuid() else None)
        if persist:
            if not processes.count:
                raise TargetError(f"no process maps '{processes.module}'")
            is_kept = True
            console.note("processes that start later are not patched")
            return 0 if is_complete else 1
        console.write(f"new processes that map '{processes.module}' are patched, too; Ctrl-C restores the function")
        while not _await_signal():
            _tell(processes)
    finally:
        if not is_kept:
            is_restored = _restore_all(processes)
    return 0 if is_restored and not processes.is_skipping else 1


def _tell(processes: PatchedProcesses) -> bool:
    """Patch the processes that were not examined yet, and print the result of each; return whether all are patched."""
    from dprobes.engines.ptrace.patching.live_patches import description_of

    is_complete = True
    for result in processes.look():
        if result.planned is not None and result.inserted is not None:
            print_line(f"{description_of(result.planned, result.inserted)} ({escaped(result.name)})")
        elif result.is_inherited:
            print_line(f"process {result.pid} ({escaped(result.name)}) has a copy of its parent's patch")
        elif result.error is not None:
            is_complete = False
            message = f"process {result.pid} ({escaped(result.name)}) is not patched: {result.error.message}"
            console.warning(message, hint=result.error.hint)
        if _ENDING & signal.sigpending():
            break
    return _warn_of_skipped(processes) and is_complete


def _warn_of_skipped(processes: PatchedProcesses) -> bool:
    """Print the notices about users whose processes were not all looked at; return whether there are none."""
    notices = list(processes.notices())
    for notice in notices:
        console.warning(notice.text, hint=notice.hint)
    return not notices


def _await_signal() -> bool:
    """Wait for a signal that ends the run, but not longer than until the next look; return whether there is one."""
    return signal.sigtimedwait(_ENDING, _LOOK) is not None


def _restore_all(processes: PatchedProcesses) -> bool:
    """Restore the function in all processes, and print the result of each; return whether all are restored."""
    from dprobes.engines.ptrace.patching.live_patches import restored_text

    is_restored = True
    for pid, record, error in processes.restore():
        if error is None:
            with contextlib.suppress(OSError, DprobesError):  # the others are restored also without a reader
                print_line(restored_text(pid, record))
        else:
            is_restored = False
            console.warning(f"the patch stays in process {pid}: {error.message}", hint=error.hint)
    _warn_of_skipped(processes)
    return is_restored


def _await_end(process: int) -> bool:
    """Wait for a signal that ends the run, or for the end of a process, a pidfd; return whether that has ended."""
    from dprobes.platform.linux.process_calls import signal_descriptor, signal_set

    signals = signal_descriptor(signal_set(_ENDING))
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(signals, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll()}
        return process in ready
    finally:
        os.close(signals)


def _refuse_ignored(
    verb: str,
    patch: str | None,
    build_id: str | None,
    idle: float | None,
    replaces: bool,
    persist: bool,
) -> None:
    """Raise ``UsageError`` for an argument or an option of an insertion that ``--list`` or ``--remove`` ignores."""
    given = {
        "argument": patch, "--build-id": build_id, "--when-idle": idle, "--replace": replaces, "--persist": persist,
    }  # fmt: skip
    for option, value in given.items():
        if value:
            raise click.UsageError(f"{verb} takes no {option}")


def _restore(pid: int, record: PatchRecord) -> bool:
    from dprobes.engines.ptrace.patching.live_patches import remove_patch, restored_text

    if remove_patch(pid, record):
        print_line(restored_text(pid, record))
        return True
    console.warning(f"'{record.function}' in process {pid} no longer has the jump of the patch: nothing was restored")
    return False


def _listed(pid: int | None) -> list[tuple[int, PatchRecord, PatchState]]:
    """Return the patches of a process, or with None of all processes that this user may inspect, with their states."""
    from dprobes.engines.ptrace.patching.patch_records import listed_patches

    if pid is not None:
        return [(pid, record, state) for record, state in listed_patches(pid)]
    found = []
    for each in sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        with contextlib.suppress(DprobesError, OSError):
            found += [(each, record, state) for record, state in listed_patches(each)]
    return found


def _list(pid: int | None) -> int:
    header: tuple[str, ...] = ("FUNCTION", "MODULE", "STATE", "PATCH", "KIB")
    rows: list[tuple[str, ...]] = [
        (str(each), record.function, Path(record.module).name, state.value, _written(record), f"{record.size >> 10}")
        for each, record, state in _listed(pid)
    ]
    if pid is None:
        print_table(("PID", *header), rows)
    else:
        print_table(header, [row[1:] for row in rows])
    return 0


def _written(record: PatchRecord) -> str:
    return f"{record.path}:{record.symbol}"


def _is_named(record: PatchRecord, named: str) -> bool:
    """Return whether the argument of --remove names a patch: its function, or its object and symbol."""
    if named in (record.function, _written(record)):
        return True
    found = _PATCH.fullmatch(named)
    if found is None or str(Path(found["path"]).absolute()) != record.path or found["symbol"] != record.symbol:
        return False
    module, _, function = (found["function"] or "").rpartition(":")
    return function in ("", record.function) and Path(module).name in ("", Path(record.module).name)


def _remove(pid: int | None, named: str | None) -> int:
    from dprobes.engines.ptrace.patching.patch_records import PatchState

    present = [(each, record) for each, record, state in _listed(pid) if state is not PatchState.REMOVED]
    found = [(each, record) for each, record in present if named is None or _is_named(record, named)]
    if not found:
        of_it = f" of '{named}'" if named is not None else ""
        who, where = ("no process has a", "--everywhere") if pid is None else (f"process {pid} has no", f"-p {pid}")
        raise TargetError(f"{who} patch{of_it}", hint=f"dprobes patch --list {where} lists them")
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    is_restored = True
    for each, record in reversed(found):
        try:
            is_restored &= _restore(each, record)
        except DprobesError as error:
            if pid is not None:
                raise
            is_restored = False
            console.warning(f"the patch stays in process {each}: {error.message}", hint=error.hint)
    return 0 if is_restored else 1

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
from dprobes.errors import TargetError, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ptrace.patching.live_patches import PlannedPatch
    from dprobes.engines.ptrace.patching.patch_records import PatchRecord

__all__ = ["patch_command"]

_PATCH = re.compile(r"(?P<path>.+?):(?P<symbol>[^:=]+)(?:=(?P<function>.+))?")
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@click.command("patch")
@click.argument("patch", metavar="OBJECT:SYMBOL[=FUNCTION]", required=False)
@click.option("-p", "--pid", type=PROCESS_ID, required=True, help="The process whose function is replaced.")
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
    pid: int,
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
    if lists:
        return _list(pid)
    if not allow_write:
        raise click.UsageError("a patch changes the code of the process: allow it with --allow-write")
    if removes:
        return _remove(pid, patch)
    if patch is None or (found := _PATCH.fullmatch(patch)) is None:
        raise click.UsageError("expected OBJECT:SYMBOL[=FUNCTION], such as ./fix.so:parse=parse_header")
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
    if (text := inlined_text(planned)) is not None:
        console.warning(text)


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


def _restore(pid: int, record: PatchRecord) -> bool:
    from dprobes.engines.ptrace.patching.live_patches import remove_patch, restored_text

    if remove_patch(pid, record):
        print_line(restored_text(pid, record))
        return True
    console.warning(f"'{record.function}' in process {pid} no longer has the jump of the patch: nothing was restored")
    return False


def _list(pid: int) -> int:
    from dprobes.engines.ptrace.patching.patch_records import listed_patches

    rows = [
        (record.function, Path(record.module).name, state.value, _written(record), f"{record.size >> 10}")
        for record, state in listed_patches(pid)
    ]
    print_table(("FUNCTION", "MODULE", "STATE", "PATCH", "KIB"), rows)
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
    return found["function"] in (None, record.function)


def _remove(pid: int, named: str | None) -> int:
    from dprobes.engines.ptrace.patching.patch_records import PatchState, listed_patches

    present = [record for record, state in listed_patches(pid) if state is not PatchState.REMOVED]
    found = [record for record in present if named is None or _is_named(record, named)]
    if not found:
        of_it = f" of '{named}'" if named is not None else ""
        raise TargetError(f"process {pid} has no patch{of_it}", hint=f"dprobes patch --list -p {pid} lists them")
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    failed = [each for each in reversed(found) if not _restore(pid, each)]
    return 1 if failed else 0

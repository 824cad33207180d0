"""Blocks of a program that dprobes itself executes during a run: ``begin``, ``every`` and ``end``."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.cli import console
from dprobes.cli.console import print_lines
from dprobes.dpc.emitters.program_emitter import template_file
from dprobes.dpc.syntax.syntax_tree import BlockKind
from dprobes.dpc.tool_interpreter import NAME, ToolError, ToolInterpreter
from dprobes.dpc.typedtree.process_items import ItemKind, ProcessItem
from dprobes.dpc.typedtree.typed_values import VariableKind
from dprobes.engines.engine_interface import Stop, TableChange, VariableChange
from dprobes.errors import DprobesError, TargetError, reason_of
from dprobes.formatters.templates.template_collection import templates_in
from dprobes.formatters.templates.template_renderer import render
from dprobes.keyed.table_layout import shown_value
from dprobes.record.log_record import LogRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.cli.output.run_views import TableOutput
    from dprobes.dpc.tool_block import ToolProgram
    from dprobes.dpc.typedtree.typed_program import TypedBlock
    from dprobes.engines.attachment_group import AttachmentGroup
    from dprobes.formatters.templates.template_model import Template

__all__ = ["ToolBlocks"]

_FILE_MAX = 1 << 20
"""Maximum number of bytes of a file that are printed."""


class ToolBlocks:
    """
    Executor of a program's blocks, one at a time (``dpc.tool_interpreter.ToolHost``).

    ``tables`` prints tables. With ``as_json``, a ``printf`` is an object in a line. With ``aside``, it goes to standard
    error.
    """

    def __init__(
        self, tool: ToolProgram, attachment: AttachmentGroup, tables: TableOutput, *, as_json: bool, aside: bool
    ) -> None:
        self._tool = tool
        self._attachment = attachment
        self._tables = tables
        self._as_json = as_json
        self._aside = aside
        self._interpreter = ToolInterpreter(tool, self)
        self._templates: dict[str, Template] = {}
        self._unread: set[tuple[ItemKind, int]] = set()
        """The processes whose files or mappings this user must not read."""
        self._executing = threading.Lock()
        self._block: TypedBlock | None = None
        self._over = threading.Event()
        self.has_quit = False
        """True if a block has requested the end of the run."""
        self._system: dict[str, Callable[[], int]] = {
            "pid": os.getpid,
            "tid": threading.get_native_id,
            "uid": os.getuid,
            "procid": lambda: 0,
            "time": time.monotonic_ns,
        }

    @property
    def are_repeated(self) -> bool:
        """True if the program has ``every`` blocks."""
        return any(each.block.kind is BlockKind.EVERY for each in self._tool.blocks)

    def begin(self) -> None:
        """Execute the ``begin`` blocks of the program, in the order of the source."""
        self._execute_all(BlockKind.BEGIN)

    @contextlib.contextmanager
    def repeated(self, await_beginning: Callable[[], None]) -> Iterator[None]:
        """
        Execute the ``every`` blocks at their intervals, until the end of the context.

        The intervals begin when ``await_beginning`` has returned, at the latest at the end of the run.
        """
        blocks = [each for each in self._tool.blocks if each.block.kind is BlockKind.EVERY]
        thread = threading.Thread(target=self._repeat, args=(blocks, await_beginning), daemon=True)
        if blocks:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            if blocks:
                thread.join()

    def end(self) -> None:
        """Execute the ``end`` blocks of the program, in the order of the source."""
        self._execute_all(BlockKind.END)
        for kind in ItemKind:
            if count := sum(each is kind for each, _ in self._unread):
                what = f"the loops over '{kind.value}' left out {count} process{'es' if count > 1 else ''}"
                console.warning(f"{what} of other users", "run dprobes as root")

    def _execute_all(self, kind: BlockKind) -> None:
        for block in self._tool.blocks:
            if block.block.kind is kind:
                self._execute(block)

    def _repeat(self, blocks: list[TypedBlock], await_beginning: Callable[[], None]) -> None:
        await_beginning()
        now = time.monotonic_ns()
        due = [(now + block.block.period, number) for number, block in enumerate(blocks)]
        heapq.heapify(due)
        while True:
            when, number = due[0]
            if self._over.wait(max(0.0, (when - time.monotonic_ns()) / 1e9)):
                return
            try:
                self._execute(blocks[number])
            except BrokenPipeError:
                self._attachment.change([Stop()])
                return
            # A block that takes longer than its period skips the missed times.
            period = blocks[number].block.period
            passed = max(0, (time.monotonic_ns() - when) // period)
            heapq.heapreplace(due, (when + (passed + 1) * period, number))

    def _execute(self, block: TypedBlock) -> None:
        with self._executing:
            self._block = block
            try:
                self._interpreter.execute(block)
            except ToolError as error:
                span = error.span or block.block.span
                console.warning(f"{span.file.name}:{span.line}: {error.message} has ended '{block.block.written}'")
            except DprobesError as error:
                console.warning(f"'{block.block.written}': {error.message}", error.hint)

    # Operations of blocks

    def variable(self, kind: VariableKind, index: int) -> int:
        """Return the 64 bits of a variable, or 0 if it does not exist."""
        if kind is VariableKind.LOCAL:
            variables = self._attachment.local_variables()
            return variables[index] if 0 <= index < len(variables) else 0
        assert self._attachment.globals is not None
        cells = self._attachment.globals.cells()
        try:
            return cells[index] if 0 <= index < len(cells) else 0
        finally:
            cells.close()

    def set_variable(self, kind: VariableKind, index: int, value: int) -> None:
        """Set the variable of a kind with an index; do nothing if it does not exist."""
        if kind is VariableKind.LOCAL:
            if 0 <= index < len(self._attachment.local_variables()):
                self._attachment.change([VariableChange(index, value)])
            return
        assert self._attachment.globals is not None
        cells = self._attachment.globals.cells()
        try:
            if 0 <= index < len(cells):
                cells[index] = value
        finally:
            cells.close()

    def table_value(self, table: int, key: bytes) -> int:
        """Return the number of a key, 0 if it has none."""
        contents = self._attachment.tables()[table]
        return next((shown_value(contents.table, row.cells) for row in contents.rows if row.key == key), 0)

    def table_kept(self, table: int, key: bytes) -> bytes:
        """Return the bytes that a table stores for a key, zeros if there are none."""
        contents = self._attachment.tables()[table]
        found = next((row.cells for row in contents.rows if row.key == key), (0,) * contents.table.value_cells)
        return struct.pack(f"{len(found)}Q", *found)

    def tally(self, table: int, key: bytes, value: int) -> None:
        """Add a signed number to the value of a key in the keyed table with index ``table``."""
        self._attachment.change([TableChange(table, key, value)])

    def add(self, table: int, key: bytes, value: int) -> None:
        """Add a signed number to the one that a table of kind ``last`` keeps for a key."""
        self._attachment.change([TableChange(table, key, value, adds=True)])

    def keep(self, table: int, key: bytes, value: bytes) -> None:
        """Store the bytes of a string or call stack for a key, in memory order."""
        self._attachment.change([TableChange(table, key, value)])

    def delete(self, table: int, key: bytes) -> None:
        """Remove a key from the keyed table with index ``table``; do nothing if the table lacks it."""
        self._attachment.change([TableChange(table, key)])

    def clear(self, table: int) -> None:
        """Remove all keys from the keyed table with index ``table``."""
        self._attachment.change([TableChange(table)])

    def show(self, table: int, rows: int | None) -> None:
        """Print a keyed table, at most ``rows`` rows; None means all."""
        self._tables.show(table, rows)

    def print(self, template: str, data: bytes) -> None:
        """Print ``data``, the bytes of a record, formatted by the text of a template."""
        if template not in self._templates:
            self._templates[template] = templates_in(template_file(0, {0: template}), 0)[0]
        record = LogRecord(0, 0, process_name=NAME, data=data, word_size=8 if self._tool.word_size == 8 else 4)
        self._write(render(self._templates[template], record))

    def items(self, kind: ItemKind, process: int | None) -> Iterator[ProcessItem]:
        """Iterate over the items of a loop; count processes of other users that cannot be read."""
        try:
            match kind:
                case ItemKind.TASKS:
                    yield from _tasks(self._unread)
                case ItemKind.FILES:
                    assert process is not None
                    yield from _files(process)
                case ItemKind.MAPS:
                    assert process is not None
                    yield from _mappings(process)
        except PermissionError:
            assert process is not None
            self._unread.add((kind, process))

    def cat(self, path: str) -> None:
        """Print the contents of a file; raise ``TargetError`` if it cannot be read."""
        try:
            with Path(path).open("rb") as file:
                data = file.read(_FILE_MAX)
        except OSError as error:
            raise TargetError(f"'{path}' cannot be read: {reason_of(error)}") from None
        self._write(data.decode("utf-8", "backslashreplace"))

    def _write(self, text: str) -> None:
        if self._as_json:
            assert self._block is not None
            text = json.dumps({"block": self._block.block.written, "text": text}, ensure_ascii=False)
        if self._aside:
            console.write(text)
        else:
            print_lines(text.splitlines() or [""])

    def quit(self) -> None:
        """Request the end of the run. Blocks are not repeated any more."""
        self.has_quit = True
        self._over.set()
        self._attachment.change([Stop()])

    def system(self, name: str) -> int:
        """Return the value of a provided name, such as ``pid`` or the time, for dprobes itself."""
        return self._system[name]()


# The items of loops, from /proc. A process or task that ends in the meantime has none from then on.


def _tasks(unread: set[tuple[ItemKind, int]]) -> Iterator[ProcessItem]:
    """
    Iterate over the threads of all processes, in the order of the processes' numbers.

    Processes that the mount option ``hidepid=1`` of /proc hides are added to ``unread``.
    """
    for pid in _numbers("/proc"):
        try:
            tids = _numbers(f"/proc/{pid}/task")
        except PermissionError:
            unread.add((ItemKind.TASKS, pid))
            continue
        for tid in tids:
            with contextlib.suppress(OSError, ValueError):
                # PID (COMM) STATE PPID …: the name may contain blanks and parentheses.
                line = Path(f"/proc/{pid}/task/{tid}/stat").read_bytes()
                name, _, rest = line[line.index(b"(") + 1 :].rpartition(b")")
                state, parent, *_ = rest.split(maxsplit=2)
                yield ProcessItem((pid, tid, int(parent)), (state, name))


def _files(pid: int) -> Iterator[ProcessItem]:
    """Iterate over the open files of a process, in the order of their numbers."""
    for number in _numbers(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            path = os.readlink(f"/proc/{pid}/fd/{number}")  # noqa: PTH115 - as the kernel writes it, not as a path
            yield ProcessItem((number,), (os.fsencode(path),))


def _mappings(pid: int) -> Iterator[ProcessItem]:
    """Iterate over the mappings of a process, in the order of their addresses."""
    try:
        with Path(f"/proc/{pid}/maps").open("rb") as file:
            for line in file:
                # START-END PERMISSIONS OFFSET DEVICE INODE PATH: in a path, the kernel writes a newline as \\012.
                extent, permissions, offset, _, _, *path = line.rstrip(b"\n").split(maxsplit=5)
                start, _, end = extent.partition(b"-")
                yield ProcessItem((int(start, 16), int(end, 16), int(offset, 16)), (permissions, b"".join(path)))
    except (FileNotFoundError, ProcessLookupError):
        return


def _numbers(directory: str) -> list[int]:
    """Return the names in a directory of /proc, which are numbers, in ascending order; none if it is gone."""
    try:
        return sorted(int(each.name) for each in Path(directory).iterdir() if each.name.isdecimal())
    except (FileNotFoundError, ProcessLookupError):
        return []

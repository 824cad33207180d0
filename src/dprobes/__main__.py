"""The command ``dprobes``: ``python -m dprobes`` and the console script."""

from __future__ import annotations

import gc
import os
import signal
import sys

__all__ = ["main"]

_INTERRUPTED = 130
"""Exit status that shells report for a command that SIGINT has ended: 128 + SIGINT."""


def main() -> None:
    """Execute the command line in ``sys.argv``, and exit with its status."""
    # Importing modules creates no garbage, and the collector would take a tenth of the start.
    gc.disable()
    interrupts = _Interrupts()
    try:
        status = _run(interrupts)
    except (MemoryError, ImportError) as error:
        # The dynamic linker's message for an extension module without enough memory.
        if isinstance(error, ImportError) and "failed to map" not in str(error):
            raise
        os.write(
            2, b"dprobes: error: there is not enough memory\nhint: 'ulimit -v' shows the limit of the address space\n"
        )
        status = 1
    except BaseException:
        # At startup or during shutdown. Some callers replace KeyboardInterrupt by another exception.
        if not interrupts.came:
            raise
        status = _INTERRUPTED
    # Only Python's own shutdown remains, which a Ctrl-C may silently end. The collector would scan all modules again.
    interrupts.end()
    gc.freeze()
    sys.exit(status)


class _Interrupts:
    """A handler of SIGINT that raises KeyboardInterrupt, as Python's does, and records the signal."""

    def __init__(self) -> None:
        self.came = False
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, _number: int, _frame: object) -> None:
        self.came = True
        raise KeyboardInterrupt

    def end(self) -> None:
        """Restore the default action of SIGINT, unless it is ignored."""
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(interrupts: _Interrupts) -> int:
    from dprobes.cli import console
    from dprobes.cli.main import run
    from dprobes.standard_files import own_standard_files, settle

    own_standard_files()
    status = run(sys.argv[1:])
    for problem in settle(is_patient=not interrupts.came):
        console.warning(problem)
        if not interrupts.came:
            status = status or 1
    return status


if __name__ == "__main__":
    main()

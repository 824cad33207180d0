"""The command ``dprobes``: ``python -m dprobes`` and the console script."""

from __future__ import annotations

import gc
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its status."""
    # Nothing that is made while modules are imported is garbage: looking for it takes a tenth of the start.
    gc.disable()
    from dprobes.cli.main import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()

"""``python -m dprobes.manager`` and the console script ``dprobes-manager``: started by a client or by systemd."""

from __future__ import annotations

import sys

from dprobes.manager.daemon import main
from dprobes.manager.manager_files import ALREADY

__all__ = ["run"]


def run() -> None:
    """Run the manager, and exit with its status."""
    arguments = sys.argv[1:]
    if arguments and not arguments[0].isdecimal():
        sys.exit("usage: dprobes-manager\nThe probe manager: 'dprobes insert' starts it, or systemd; see dprobes(8).")
    status = main(arguments)
    if status == ALREADY and not arguments:
        print("dprobes manager: this user's manager runs already", file=sys.stderr)  # noqa: T201
    sys.exit(status)


if __name__ == "__main__":
    run()

"""
Whose a file is, as far as it matters: whether another user than root and ourselves decides what is in it.

Such a *foreign* owner may have made a file only to keep us busy. Names of users are not looked up: that may ask a
server.
"""

from __future__ import annotations

import os
import stat

__all__ = ["foreign_owner"]


def foreign_owner(status: os.stat_result) -> str | None:
    """Return who besides root and the user of this process can change a file; None if nobody."""
    if status.st_uid not in {0, os.geteuid()}:
        return f"user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in {0, os.getegid()}:
        return f"group {status.st_gid}"
    return None

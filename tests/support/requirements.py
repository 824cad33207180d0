"""
What a machine must have for tests: ``DPROBES_REQUIRE`` turns skips into failures.

``DPROBES_REQUIRE=all`` allows no skip, but for what a machine *is* rather than has: reasons that begin with a kind of
``NATURES``. A list of words, separated by commas, allows no skip whose reason has one of the words, such as ``gdb``, or
is of that nature: ``DPROBES_REQUIRE=all,processor`` is for a machine whose processor has everything.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NATURES", "is_required", "required_words"]

NATURES = {
    "processor": "an instruction that this processor has not, or carries out in another way",
    "newer kernel": "this kernel has no longer what is tested",
    "older kernel": "the kernel of a guest is too old for what is tested, or was built without it",
}
"""Properties that no installation changes; the reasons of such skips begin with a key, as in ``processor: ...``."""


def required_words(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the words in the variable ``DPROBES_REQUIRE`` of ``environment``."""
    words = environment.get("DPROBES_REQUIRE", "").split(",")
    return frozenset(word.strip().lower() for word in words if word.strip())


def is_required(reason: str, words: frozenset[str]) -> bool:
    """Return whether a skip for this reason is a failure; ``words`` are those of ``DPROBES_REQUIRE``."""
    reason = reason.removeprefix("Skipped: ").lower()
    nature = next((nature for nature in NATURES if reason.startswith(f"{nature}:")), None)
    if nature is not None:
        return nature in words
    named = any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", reason) for word in words)
    return named or "all" in words

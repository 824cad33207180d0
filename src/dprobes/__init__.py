"""
Dynamic Probes: a safe handler on any instruction of any running program, without source changes.

The package is used through the command ``dprobes``; see README.md for a first probe, and ARCHITECTURE.md for how the
parts fit together. ``dprobes.testing`` holds helpers for tests of probe programs.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"

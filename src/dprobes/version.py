"""The version of DProbes, where everything can import it from."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"

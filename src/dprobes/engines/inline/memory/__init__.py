"""The memory that probed processes share with us, and what handlers keep there (``native``), as seen from here."""

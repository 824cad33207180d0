"""Tests of the C preprocessor; a package, so that they share ``support``."""

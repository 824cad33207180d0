"""
The PPDF: a compiled probe program as a file, complete for a machine without its sources and symbols.

::

    Program + files of its module ─► resolve.portable_program ─► Ppdf ─► bytes ─► Ppdf

``docs/reference/ppdf.md`` describes the bytes. A file is untrusted input: for any bytes, the reader returns a ``Ppdf``
or raises ``FormatError``. The package is independent of processes and engines.

The symbols and instructions that resolution needs are stored when a program is built. A machine without the symbols
reads them from the file, so the same code finds places on both machines. Data about kernels use the addresses of the
running kernel. Code is stored as the encoded bytes only: a reader decodes the program from them, encodes it again, and
compares. Companions are PPDFs in the PPDF of their principal. Blocks of the tool are stored as typed syntax trees,
which a reader builds only if they can be executed.
"""

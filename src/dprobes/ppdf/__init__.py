"""
The PPDF: a compiled probe program as a file, with all that a machine without its sources and symbols needs.

::

    Program + files of its module ─► resolve.portable_program ─► Ppdf ─► bytes ─► Ppdf

``docs/ppdf.md`` draws the bytes. Those of others are hostile until proven otherwise: whatever the reader is given, it
returns a ``Ppdf`` or raises ``FormatError``. It knows nothing of processes and engines.

What resolution asks when a program is built is stored, and answered from the file on a machine without the symbols; so
the same code finds places on both. Of kernels the answers are given with the addresses of the kernel that runs. Code
is stored as the encoded bytes only: a reader decodes the program from them, encodes it again, and compares. Companions
are files in the file of their principal; blocks of the tool are its typed tree, which a reader builds only if it can
be executed.
"""

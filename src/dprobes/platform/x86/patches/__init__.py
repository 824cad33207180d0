"""
Where a jump to a trampoline can take the place of an instruction of x86-64 code, and what is executed instead of it.

Everything here is computed from bytes, addresses and mappings; no process is touched.
"""

"""
A file system whose only file can be opened and mapped, but whoever reads it waits for ever; it ends with this process.

    silentfiles.py DIRECTORY    mounts it, and prints a line when it is there
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys

NAME = b"silent"
SIZE = 1 << 20
IN_HEADER = struct.Struct("=IIQQIIII")
OUT_HEADER = struct.Struct("=IiQ")
LOOKUP, FORGET, GETATTR, OPEN, READ, INIT, READDIR = 1, 2, 3, 14, 15, 26, 28
"""Opcodes; see include/uapi/linux/fuse.h."""
ROOT, FILE = 1, 2


def attributes(node: int) -> bytes:
    mode, size = (stat.S_IFDIR | 0o755, 0) if node == ROOT else (stat.S_IFREG | 0o755, SIZE)
    return struct.pack("=6Q10I", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def answer(opcode: int, node: int, body: bytes) -> bytes | int | None:
    """Return what is said to a request, a number of an error, or None for nothing."""
    if opcode == INIT:
        return struct.pack("=IIIIHHIIHHI7I", 7, 31, 1 << 16, 0, 8, 8, 1 << 16, 1, 16, 0, 0, *[0] * 7)
    if opcode == LOOKUP:
        if body.rstrip(b"\0") != NAME:
            return errno.ENOENT
        return struct.pack("=4Q2I", FILE, 1, 3600, 3600, 0, 0) + attributes(FILE)
    if opcode == GETATTR:
        return struct.pack("=Q2I", 3600, 0, 0) + attributes(node)
    if opcode == OPEN:
        return struct.pack("=Q2I", 1, 0, 0)
    if opcode in (READ, FORGET):
        return None
    return errno.ENOSYS


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"silent", os.fsencode(sys.argv[1]), b"fuse", 6, options):  # MS_NOSUID | MS_NODEV
        sys.exit(os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    while True:
        request = os.read(device, 1 << 18)
        _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
        said = answer(opcode, node, request[IN_HEADER.size :])
        if said is None:
            continue
        failure, data = (-said, b"") if isinstance(said, int) else (0, said)
        os.write(device, OUT_HEADER.pack(OUT_HEADER.size + len(data), failure, unique) + data)


if __name__ == "__main__":
    main()

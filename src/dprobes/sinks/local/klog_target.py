"""
Kernel's log (``/dev/kmsg``, Documentation/ABI/testing/dev-kmsg), with a message for each line.

The log is a ring buffer: unread messages are overwritten, without any notice to the writer.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.errors import SinkError, reason_of
from dprobes.sinks.text_sinks import TextSink, refuse_binary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.sinks import Sink, SinkOptions

__all__ = ["DEVICE", "KernelLogOutlet", "open"]

DEVICE = "/dev/kmsg"

_PREFIX = b"<6>"  # LOG_KERN is the kernel's own; user space gets LOG_USER and, from this, the severity "info"

_LINE_MAX = 976
"""Maximum size of a message in bytes: LOG_LINE_MAX of the kernel is 1024 less its own prefix (48 bytes in printk.c)."""
_READ_MAX = 1900
"""
Maximum size in bytes of a message as read from the device, where a non-printable byte takes four (``\\xc3``).

The kernel truncates it at PRINTK_MESSAGE_MAX, 2048 with the message's number and time (msg_add_ext_text in printk.c).
"""

_PLAIN = bytes(code for code in range(0x20, 0x7F) if code != ord("\\"))

_BURST = 10
"""
Number of messages after which the device is reopened.

With ``kernel.printk_devkmsg=ratelimit``, the default, the kernel accepts ten messages in five seconds per open file of
the device, and silently drops more (DEFAULT_RATELIMIT_BURST, devkmsg_write in printk.c).
"""


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """Open the kernel's log; raise ``SinkError`` if that fails."""
    if argument:
        raise SinkError(f"log target KLOG takes no argument, found '{argument}'")
    refuse_binary("KLOG", options)
    return TextSink(KernelLogOutlet(), options.format_name)


class KernelLogOutlet:
    """The kernel's log; lines longer than ``_LINE_MAX`` bytes are split into several messages."""

    def __init__(self) -> None:
        self._file = self._open()
        self._count = 0

    def write(self, strings: Sequence[str]) -> None:
        """Write each line of each record as a message; raise ``SinkError`` if the kernel refuses one."""
        for taken, text in enumerate(strings):
            try:
                self._write_record(text)
            except OSError as error:
                raise SinkError(f"'{DEVICE}': {reason_of(error)}", taken=taken) from error

    def _write_record(self, text: str) -> None:
        for line in text.split("\n"):
            data = line.encode("utf-8", "backslashreplace")
            while True:
                size = _fitting(data)
                self._write(_PREFIX + data[:size] + b"\n")  # without a line end the message stays open
                data = data[size:]
                if not data:
                    break

    def _open(self) -> int:
        try:
            return os.open(DEVICE, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            hint = None
            if isinstance(error, PermissionError):
                hint = "this needs root, and that 'sysctl kernel.printk_devkmsg' is not 'off'"
            raise SinkError(f"'{DEVICE}' cannot be opened: {reason_of(error)}", hint=hint) from error

    def _write(self, message: bytes) -> None:
        if self._count == _BURST:
            file = self._open()
            os.close(self._file)
            self._file, self._count = file, 0
        os.write(self._file, message)
        self._count += 1

    def flush(self) -> None:
        """Do nothing: written messages are visible at once."""

    def close(self) -> None:
        """Close /dev/kmsg."""
        os.close(self._file)


def _fitting(data: bytes) -> int:
    """Return the number of bytes at the start of a line that fit into a message without splitting a character."""
    size = min(len(data), _LINE_MAX)
    while (excess := size + 3 * len(data[:size].translate(None, _PLAIN)) - _READ_MAX) > 0:
        size -= (excess + 3) // 4
    end = size
    while size < len(data) and size and data[size] & 0xC0 == 0x80:
        size -= 1
    return size or end

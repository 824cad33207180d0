"""A serial line: the text of records with CR LF, as the original's COM1 and COM2."""

from __future__ import annotations

import os
import termios
import time
import tty
from typing import TYPE_CHECKING

from dprobes.errors import SinkError, reason_of
from dprobes.sinks.texts import TextSink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.sinks.base import Sink, SinkOptions

__all__ = ["SerialOutlet", "open"]

_PATIENCE = 5.0
"""Seconds that a line may take no byte, as with flow control, until that is an error."""

_INTERVAL = 0.01


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """Open the serial line that is named."""
    if not argument:
        raise SinkError("log target 'serial' needs a device: serial:/dev/ttyUSB0")
    return TextSink(SerialOutlet(argument), options.format_name)


class SerialOutlet:
    """Write to a serial line in raw mode at 115200 baud; the line's settings are put back at the end."""

    def __init__(self, device: str) -> None:
        self._device = device
        try:
            # O_NONBLOCK: a line without carrier must not be waited for.
            self._file = os.open(device, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                self._settings = termios.tcgetattr(self._file)
                tty.setraw(self._file)
                raw = termios.tcgetattr(self._file)
                raw[4] = raw[5] = termios.B115200
                termios.tcsetattr(self._file, termios.TCSANOW, raw)
            except BaseException:
                os.close(self._file)
                raise
        except OSError as error:
            raise self._error(error) from error
        except termios.error as error:
            raise SinkError(f"'{device}' is no serial line: {str(error.args[1]).lower()}") from error

    def write(self, texts: Sequence[str]) -> None:
        """Write lines, each with CR LF."""
        for taken, text in enumerate(texts):
            try:
                self._write((text.replace("\n", "\r\n") + "\r\n").encode("ascii", "backslashreplace"))
            except SinkError as error:
                error.taken = taken
                raise

    def _write(self, data: bytes) -> None:
        until = time.monotonic() + _PATIENCE
        while data:
            try:
                data = data[os.write(self._file, data) :]
                until = time.monotonic() + _PATIENCE
            except BlockingIOError:
                if time.monotonic() > until:
                    raise SinkError(f"'{self._device}' has taken nothing for {_PATIENCE:.0f} s") from None
                time.sleep(_INTERVAL)
            except OSError as error:
                raise self._error(error) from error

    def flush(self) -> None:
        """Do nothing: the driver has the bytes when they are written."""

    def close(self) -> None:
        """Put the line's settings back and give it up."""
        try:
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._settings)
        except (OSError, termios.error) as error:
            raise SinkError(f"'{self._device}': {error}") from error
        finally:
            os.close(self._file)

    def _error(self, error: OSError) -> SinkError:
        return SinkError(f"'{self._device}' cannot be written: {reason_of(error)}")

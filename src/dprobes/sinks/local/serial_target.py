"""A serial line: the text of records with CR LF, or frames (``line_frames``), as on the original's COM1 and COM2."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import termios
import time
from typing import TYPE_CHECKING, Any

from dprobes.errors import SinkError, reason_of, reason_of_number
from dprobes.sinks.text_sinks import byte_sink, write_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.sinks import Sink, SinkOptions

__all__ = ["SerialOutlet", "open"]

_BAUD = 115200

_PATIENCE = 10.0
"""Seconds without progress, as with flow control, after which a write to the line fails."""

_INTERVAL = 0.01


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """Open the serial line in the argument; raise ``SinkError`` if that fails."""
    device, at, speed = argument.rpartition("@")
    if not at:
        device, speed = argument, str(_BAUD)
    if not device:
        raise SinkError("log target 'serial' needs a device: serial:/dev/ttyUSB0")
    if not (speed.isascii() and speed.isdigit() and int(speed)):
        raise SinkError(f"log target 'serial:{argument}': expected a speed in baud after '@', found '{speed}'")
    return byte_sink(SerialOutlet(device, int(speed)), options, line_end="\r\n", encoding="ascii")


class SerialOutlet:
    """
    Serial line, configured by pyserial: 8 data bits, no parity, one stop bit, no flow control.

    It is opened exclusively. Its settings are restored when it is closed.
    """

    def __init__(self, device: str, baud: int = _BAUD) -> None:
        self._device = device
        self._before = self._settings()
        if importlib.util.find_spec("serial") is None:
            raise SinkError(
                "a serial line needs the package pyserial, which is not installed",
                hint="pip install 'dprobes[serial]'",
            )
        from serial import Serial, SerialException  # type: ignore[import-untyped]

        try:
            self._line = Serial(device, baud, exclusive=True)
        except (SerialException, OSError, ValueError) as error:
            # The messages of pyserial repeat the device, and contain the system's as a tuple.
            number = getattr(error, "errno", None)
            said = reason_of_number(number) if number else str(error)
            raise SinkError(f"'{device}' cannot be set up for {baud} baud: {said}") from error

    def _settings(self) -> list[Any]:
        """Return the line's settings; raise ``SinkError`` if it is not a serial line, or inaccessible."""
        try:
            # O_NONBLOCK: opening a line without carrier must not block.
            line = os.open(self._device, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise SinkError(f"'{self._device}' cannot be written: {reason_of(error)}") from error
        try:
            return termios.tcgetattr(line)
        except termios.error as error:
            raise SinkError(f"'{self._device}' is not a serial line: {str(error.args[1]).lower()}") from error
        finally:
            os.close(line)

    def write(self, parts: Sequence[bytes]) -> None:
        """Write records; raise ``SinkError`` if the line does not accept all of them."""
        written = write_parts(self._line.fileno(), parts, _PATIENCE)
        if written.problem is not None:
            # A close would wait until the driver has sent its buffer.
            with contextlib.suppress(OSError, termios.error):
                self._line.reset_output_buffer()
            raise SinkError(f"'{self._device}': {written.problem}", taken=written.parts)

    def flush(self) -> None:
        """Do nothing: written bytes are in the driver."""

    def close(self) -> None:
        """
        Wait until the driver has sent its buffer, restore the settings and close the line.

        Raise ``SinkError`` if the driver stops sending.
        """
        try:
            if left := self._await_sent():
                self._line.reset_output_buffer()
                raise SinkError(f"'{self._device}': {left} bytes were not sent for {_PATIENCE:.0f} s")
            termios.tcsetattr(self._line.fileno(), termios.TCSANOW, self._before)
        except (OSError, termios.error) as error:
            raise SinkError(f"'{self._device}': {str(error.args[-1]).lower()}") from error
        finally:
            self._line.close()

    def _await_sent(self) -> int:
        """Wait until all bytes are sent, as long as their number decreases; return the number of unsent bytes."""
        least, until = self._line.out_waiting, time.monotonic() + _PATIENCE
        while least and time.monotonic() < until:
            time.sleep(_INTERVAL)
            if (left := self._line.out_waiting) < least:
                least, until = left, time.monotonic() + _PATIENCE
        return int(least)

"""A progress line on stderr."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

REDRAW_SECONDS = 0.1
LOG_SECONDS = 5.0


class Progress:
    """Shows share, count, rate and time left: one line redrawn on a terminal, a plain line now and then in a log.

    Work that ends within a few seconds leaves no trace in a log.
    """

    def __init__(
        self,
        unit: str,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        every: float | None = None,
    ) -> None:
        """Start the clock.

        Args:
            unit: what is counted, in the plural.
            stream: stderr if not given.
            clock: seconds, from any origin.
            every: seconds between two lines; 0.1 on a terminal and 5 elsewhere if not given.
        """
        self._unit, self._clock = unit, clock
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._every = every if every is not None else REDRAW_SECONDS if self._terminal else LOG_SECONDS
        self._began = self._shown = clock()
        self._width = 0

    def update(self, done: int, total: int) -> None:
        """Report that `done` of `total` units are ready; prints only when it is time to."""
        now = self._clock()
        if now - self._shown < self._every:
            return
        self._shown = now
        line = progress_line(done, total, now - self._began, self._unit)
        if self._terminal:
            self._redraw(line)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Take the line off a terminal, so that what follows starts on a clean one."""
        if self._terminal and self._width:
            self._redraw("")
            self._stream.write("\r")
            self._stream.flush()

    def _redraw(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)


def progress_line(done: int, total: int, seconds: float, unit: str) -> str:
    """Such as ` 42% 420/1000 tokens, 210 tokens/s, eta 3 s`."""
    percent = 100 * done // total if total else 100  # rounded down: 100 % means finished
    rate = done / seconds if seconds > 0 else 0.0
    left = f"{(total - done) / rate:.0f} s" if rate > 0 else "?"
    return f"{percent:3d}% {done}/{total} {unit}, {rate:.0f} {unit}/s, eta {left}"

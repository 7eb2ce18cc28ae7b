"""A progress line on stderr."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Self, TextIO

REDRAW_SECONDS = 0.1
QUIET_SECONDS = 1.0
"""On a terminal a line appears after this many seconds even if nothing was reported."""
LOG_SECONDS = 5.0
BAR_WIDTH = 20


class Progress:
    """Shows share, count, rate and time left: a bar redrawn on a terminal, a plain line every 5 seconds in a log.

    Before the first report the line shows what is being done and for how long. Work that ends within a few seconds
    leaves no line in a log. Use it in a `with` statement.
    """

    def __init__(
        self,
        unit: str,
        doing: str = "starting",
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        every: float | None = None,
    ) -> None:
        """Start the clock.

        Args:
            unit: what is counted, in the plural.
            doing: what is done until the first report, such as "drawing".
            stream: stderr if not given.
            clock: seconds, from any origin.
            every: seconds between two lines; 0.1 on a terminal and 5 elsewhere if not given.
        """
        self._unit, self._doing, self._clock = unit, doing, clock
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._every = every if every is not None else REDRAW_SECONDS if self._terminal else LOG_SECONDS
        self._began = self._shown = clock()
        self._last: tuple[int, int] | None = None
        self._width = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        """Start a thread that keeps the line current between reports."""
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        """Clear the line."""
        self.close()

    def update(self, done: int, total: int) -> None:
        """Report that `done` of `total` units are ready; prints only when it is time to."""
        with self._lock:
            self._last = done, total
            self._show(self._every)

    def close(self) -> None:
        """Clear the line on a terminal, so that the next output starts at its beginning."""
        with self._lock:
            self._closed.set()
            if self._terminal and self._width:
                self._redraw("")
                self._write("\r")

    def _watch(self) -> None:
        silence = QUIET_SECONDS if self._terminal else self._every
        while not self._closed.wait(silence / 2):
            with self._lock:
                if not self._closed.is_set():
                    self._show(silence)

    def _show(self, silence: float) -> None:
        now = self._clock()
        if now - self._shown < silence:
            return
        self._shown = now
        seconds = now - self._began
        line = f"{self._doing}... {seconds:.0f} s"
        if self._last is not None:
            line = progress_line(*self._last, seconds, self._unit)
        if self._terminal:
            self._redraw(line if self._last is None else f"{progress_bar(*self._last)} {line}")
        else:
            self._write(f"{line}\n")

    def _redraw(self, line: str) -> None:
        self._write("\r" + line.ljust(self._width))
        self._width = len(line)

    def _write(self, text: str) -> None:
        """Write to the stream; a closed or full stream does not stop the work."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()


def waiting(doing: str) -> Progress:
    """Progress of work that cannot be counted."""
    return Progress("", doing)


def progress_bar(done: int, total: int) -> str:
    """A bar such as `[========            ]`."""
    filled = BAR_WIDTH * done // total if total else BAR_WIDTH
    return f"[{'=' * filled:<{BAR_WIDTH}}]"


def progress_line(done: int, total: int, seconds: float, unit: str) -> str:
    """A line such as ` 42% 420/1000 tokens, 210 tokens/s, eta 3 s`."""
    percent = 100 * done // total if total else 100  # rounded down, so that 100 % means finished
    rate = done / seconds if seconds > 0 else 0.0
    left = f"{(total - done) / rate:.0f} s" if rate > 0 else "?"
    return f"{percent:3d}% {done}/{total} {unit}, {rate:.0f} {unit}/s, eta {left}"

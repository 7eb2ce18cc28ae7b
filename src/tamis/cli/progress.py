"""Progress on stderr: a bar of rich on a terminal, a plain line now and then in a log."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    import rich.progress

LOG_SECONDS = 5.0
"""Seconds between two lines in a log."""


class Progress:
    """Shows share, count, rate and time left. Before the first report it shows what is being done and for how long.

    On a terminal the bar goes away at the end. Work that ends within a few seconds leaves no line in a log. Use it in a
    `with` statement.
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
            clock: seconds, from any origin; only for lines in a log.
            every: seconds between two lines in a log; 5 if not given.
        """
        self._unit, self._doing, self._clock = unit, doing, clock
        self._stream = sys.stderr if stream is None else stream
        self._every = LOG_SECONDS if every is None else every
        self._began = self._shown = clock()
        self._last: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._bar: rich.progress.Progress | None = None

    def __enter__(self) -> Self:
        """Show the bar, or start a thread that writes lines between reports."""
        with contextlib.suppress(ImportError):  # `tamis doctor` answers without rich as well
            self._bar = _bar(self._stream) if self._stream.isatty() else None
        if self._bar is not None:
            self._bar.add_task(f"{self._doing}...", total=None, unit="", rate="")
            self._bar.start()
        else:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        """Clear the bar."""
        self.close()

    def update(self, done: int, total: int) -> None:
        """Report that `done` of `total` units are ready; a log gets a line only when it is time to."""
        with self._lock:
            if self._closed.is_set():
                return
            self._last = done, total
            if self._bar is not None:
                rate = progress_rate(done, self._clock() - self._began, self._unit)
                # A finished bar would stand still while the last work goes on.
                self._bar.update(
                    self._bar.task_ids[0], description="", completed=done, total=total, unit=self._unit, rate=rate
                )
            else:
                self._show()

    def close(self) -> None:
        """Clear the bar on a terminal, so that the next output starts at the beginning of its line."""
        with self._lock:
            self._closed.set()
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def _watch(self) -> None:
        while not self._closed.wait(self._every / 2):
            with self._lock:
                if not self._closed.is_set():
                    self._show()

    def _show(self) -> None:
        now = self._clock()
        if now - self._shown < self._every:
            return
        self._shown = now
        seconds = now - self._began
        line = f"{self._doing}... {seconds:.0f} s"
        if self._last is not None:
            line = progress_line(*self._last, seconds, self._unit)
        with contextlib.suppress(OSError):  # a closed or full log does not stop the work
            self._stream.write(f"{line}\n")
            self._stream.flush()


def waiting(doing: str) -> Progress:
    """Progress of work that cannot be counted."""
    return Progress("", doing)


def _bar(stream: TextIO) -> "rich.progress.Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    class Counted(MofNCompleteColumn):
        """`420/1000 tokens`; nothing while the total is unknown."""

        def render(self, task: "rich.progress.Task") -> "rich.text.Text":
            from rich.text import Text

            return Text() if task.total is None else super().render(task).append(f" {task.fields['unit']}")

    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        Counted(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=stream, highlight=False),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def progress_rate(done: int, seconds: float, unit: str) -> str:
    """The rate, such as `210 tokens/s`."""
    return f"{done / seconds if seconds > 0 else 0.0:.0f} {unit}/s"


def progress_line(done: int, total: int, seconds: float, unit: str) -> str:
    """A line such as ` 42% 420/1000 tokens, 210 tokens/s, eta 3 s`."""
    percent = 100 * done // total if total else 100  # rounded down, so that 100 % means finished
    left = f"{(total - done) * seconds / done:.0f} s" if done and seconds > 0 else "?"
    return f"{percent:3d}% {done}/{total} {unit}, {progress_rate(done, seconds, unit)}, eta {left}"

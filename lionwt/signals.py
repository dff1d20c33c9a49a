"""Signals as exceptions, and as something that can wait for a few milliseconds.

SIGTERM and SIGHUP end a command the way Ctrl-C does: the stack unwinds, what
was made is undone, the exit code is 128 + n. Between the moving of a target and
the last step of its landing they are held back: that stretch is short, and
stopping in it would only make work for ``reconcile``.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked the command to end; ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


def raise_interrupted(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


def install() -> None:
    """Turn the ending signals into :class:`Interrupted`; for a command's main thread."""
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, raise_interrupted)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Keep the ending signals waiting until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers belong to the main thread; a worker thread is never interrupted
        return
    waiting: list[int] = []
    previous = {number: signal.getsignal(number) for number in _NUMBERS}
    for number in _NUMBERS:
        if previous[number] is not signal.SIG_IGN:
            signal.signal(number, lambda got, _frame: waiting.append(got))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if waiting:
            signal.raise_signal(waiting[0])

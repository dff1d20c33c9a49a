"""Wait for several things at once: git children mostly, which need no interpreter meanwhile.

Every action is given a descriptor that can be read as soon as nobody wants its
result any more (:meth:`lionwt.git.Git.stopped_by`): what hangs beside a failure
or a signal must not keep the command from ending.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class _Helpers:
    """Threads beside the caller's own, and the descriptor that tells them to stop."""

    def __init__(self, work: Callable[[], None], many: int) -> None:
        self._threads = [threading.Thread(target=work, daemon=True) for _ in range(many)]
        self.stopped, self._stop = os.pipe()
        self._stopping = threading.Lock()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        with self._stopping:
            if self._stop >= 0:
                os.close(self._stop)
                self._stop = -1

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Have them work beside the block; where it fails, or a signal comes, they are told to stop."""
        try:
            self.start()
            yield
            self.join()
        finally:
            self.stop()
            self.join()
            os.close(self.stopped)


def at_once(actions: Sequence[Callable[[int], T]], most: int = 4) -> list[T]:
    """Run every action, at most ``most`` at a time; results in order.

    After the first failure nothing more is begun, what runs is told to stop,
    and then that failure is raised.
    """
    results: dict[int, T] = {}
    failures: list[BaseException] = []
    pending = list(enumerate(actions))[::-1]
    taking = threading.Lock()

    def work() -> None:
        while True:
            with taking:
                if not pending or failures:
                    return
                number, action = pending.pop()
            try:
                results[number] = action(helpers.stopped)
            except BaseException as error:
                failures.append(error)
                helpers.stop()

    helpers = _Helpers(work, min(most, len(pending)) - 1)
    with helpers.beside():
        work()
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(actions))]


@contextlib.contextmanager
def meanwhile(action: Callable[[int], T]) -> Iterator[Callable[[], T]]:
    """Run ``action`` beside what the block does; what is yielded waits for its result, or raises its error."""
    results: list[T] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(action(helper.stopped))
        except BaseException as error:
            failures.append(error)

    def result() -> T:
        helper.join()
        if failures:
            raise failures[0]
        return results[0]

    helper = _Helpers(work, 1)
    with helper.beside():
        yield result

"""Wait for several things at once: git children mostly, which need no interpreter meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def at_once(actions: Sequence[Callable[[], T]], most: int = 4) -> list[T]:
    """Run every action, at most ``most`` at a time; results in order.

    After the first failure nothing more is begun; what runs is waited for, and
    then that failure is raised.
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
                results[number] = action()
            except BaseException as error:
                failures.append(error)

    helpers = [threading.Thread(target=work, daemon=True) for _ in range(min(most, len(pending)) - 1)]
    for helper in helpers:
        helper.start()
    try:
        work()
    finally:
        for helper in helpers:
            helper.join()
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(actions))]


@contextlib.contextmanager
def meanwhile(action: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Run ``action`` beside what the block does; what is yielded waits for its result, or raises its error."""
    results: list[T] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(action())
        except BaseException as error:
            failures.append(error)

    helper = threading.Thread(target=work, daemon=True)

    def result() -> T:
        helper.join()
        if failures:
            raise failures[0]
        return results[0]

    helper.start()
    try:
        yield result
    finally:
        helper.join()

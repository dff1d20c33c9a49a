"""The scenarios can fail: two wrong drivers are put through them, and do."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import naive
import pytest
import test_turn_scenarios
import test_turn_stress
from turn_harness import run

BOUND = 0.5  # seconds until a scenario counts as hung

# Which scenarios each driver must fail. Together they are all of them.
NAIVE_FAILS = list(range(2, 24))
CARELESS_FAILS = [1, 3, 4, 6, 7, 9, 16, 18, 22]


class _Logs(logging.Handler):
    """As much of pytest's caplog as the scenarios use."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += logging.Formatter().format(record) + "\n"

    @contextlib.contextmanager
    def at_level(self, level: int) -> Iterator[None]:
        root = logging.getLogger()
        before = root.level
        root.setLevel(level)
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)
            root.setLevel(before)


@dataclass
class Case:
    id: str
    numbers: list[int]
    function: Callable[..., Any]
    arguments: dict[str, Any]


def cases() -> Iterator[Case]:
    """Every scenario test, with each of its parameters."""
    for module in (test_turn_scenarios, test_turn_stress):
        for name, function in vars(module).items():
            if not name.startswith("test_") or not inspect.isfunction(function):
                continue
            text = re.match(r"Scenarios? ([\d, and]+)", function.__doc__ or "")
            if text is None or not _applies(function):
                continue
            numbers = [int(number) for number in re.findall(r"\d+", text[1])]
            for arguments in _parameters(function):
                yield Case(f"{name}{list(arguments.values())}", numbers, function, arguments)


def _applies(function: Any) -> bool:
    marks = getattr(function, "pytestmark", [])
    return not any(mark.name == "skipif" and mark.args[0] for mark in marks)


def _parameters(function: Any) -> Iterator[dict[str, Any]]:
    choices: list[list[dict[str, Any]]] = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names = [mark.args[0]] if isinstance(mark.args[0], str) else mark.args[0]
            rows = [row if len(names) > 1 else (row,) for row in mark.args[1]]
            choices.append([dict(zip(names, row, strict=True)) for row in rows])
    for combination in itertools.product(*choices):
        yield {name: value for part in combination for name, value in part.items()}


def verdict(driver: Any, case: Case) -> BaseException | None:
    """What the driver fails this scenario with, if it does."""
    wanted = inspect.signature(case.function).parameters
    logs = _Logs()
    arguments = {"turn": driver, "mode": "plain", "caplog": logs, **case.arguments}
    arguments = {name: arguments[name] for name in wanted}
    try:
        with logs.at_level(logging.WARNING):
            if inspect.iscoroutinefunction(case.function):
                run(lambda: case.function(**arguments), bound=BOUND, strict=False)
            else:
                case.function(**arguments)
    except pytest.skip.Exception:
        return None
    except BaseException as exc:  # scenario 19 has interrupts in it
        return exc
    return None


def _fails(driver: Any, number: int) -> bool:
    mine = [case for case in cases() if number in case.numbers]
    assert mine, f"there is no scenario {number}"
    return any(verdict(driver, case) is not None for case in mine)


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("number", NAIVE_FAILS)
def test_the_naive_driver_fails_scenario(number: int) -> None:
    assert _fails(naive.NAIVE, number)


@pytest.mark.parametrize("number", CARELESS_FAILS)
def test_the_careless_driver_fails_scenario(number: int) -> None:
    assert _fails(naive.CARELESS, number)


def test_every_scenario_is_failed_by_one_of_them() -> None:
    assert set(NAIVE_FAILS) | set(CARELESS_FAILS) == set(range(1, 24))
    assert {number for case in cases() for number in case.numbers} == set(range(1, 24))

"""Async tests get a loop of their own, plain and, from Python 3.12 on, with eager tasks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import turn_harness

import lionwt.turn


@pytest.fixture
def turn() -> Any:
    """The driver under test: a scenario is a function of it, so that another can be tried."""
    return lionwt.turn


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", turn_harness.MODES)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> None:
    if inspect.iscoroutinefunction(obj) and name.startswith("test_"):
        pytest.mark.usefixtures("mode")(obj)


@pytest.fixture
def mode() -> str:  # replaced by the parametrisation above
    return "plain"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    given = {name: pyfuncitem.funcargs[name] for name in wanted}
    mode = pyfuncitem.funcargs.get("mode", "plain")
    turn_harness.run(lambda: pyfuncitem.obj(**given), mode=mode)
    return True

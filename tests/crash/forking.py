"""Run the command many times without starting an interpreter each time.

One process imports lionwt and forks for every call: the child is a process of
its own, in a session of its own, with the test's environment and directory and
nothing else, and runs the same ``main``. So it can be killed like any other, and
a campaign of a thousand kills spends its time on what lionwt does.

A call with ``LIONWT_TRACE=<file>`` in its environment also writes down, in their
order, the fault points it passed and the durable steps it made
(:mod:`tests.crash.steps`).
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import Answer

_PROJECT = Path(__file__).resolve().parents[2]


@dataclass
class Call:
    """A command that was started; every wait for it is bounded."""

    forker: Forker
    pid: int
    pidfd: int
    out: Path
    err: Path
    code: int | None = None

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether the process ends within ``seconds``; it is a zombie then, so its id stays its own."""
        if self.code is not None:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def kill(self, number: int = signal.SIGKILL, *, group: bool = False) -> None:
        """Send a signal to the process, or to its whole group, unless it has been waited for."""
        if self.code is not None:
            return
        try:
            (os.killpg if group else os.kill)(self.pid, number)
        except ProcessLookupError:  # just forked, and in no group of its own yet
            os.kill(self.pid, number)

    def answer(self, seconds: float = 120.0) -> Answer:
        """Wait for the end; what was answered until then."""
        if not self.has_ended(seconds):
            self.kill(group=True)
            raise AssertionError(f"the command did not end within {seconds} s: {self.err.read_text()}")
        if self.code is None:
            self.code = self.forker.collect(self.pid)
            os.close(self.pidfd)
        for path in (self.out, self.err):
            path.touch()  # killed before it had opened them
        said = Answer(self.code, self.out.read_text("utf-8", "surrogateescape"), self.err.read_text("utf-8", "replace"))
        for path in (self.out, self.err):
            path.unlink()
        return said


class Forker:
    """The process that forks the commands; end it with :meth:`close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.forking"],
            cwd=_PROJECT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def start(self, arguments: Sequence[str | os.PathLike[str]], cwd: Path, env: Mapping[str, str], room: Path) -> Call:
        """Start one call; what it prints goes to files in ``room``."""
        with self._lock:
            self._calls += 1
            out, err = room / f"{self._calls}.out", room / f"{self._calls}.err"
            asked = {
                "arguments": [os.fspath(argument) for argument in arguments],
                "cwd": str(cwd),
                "env": dict(env),
                "out": str(out),
                "err": str(err),
            }
            pid = self._ask(asked)
            return Call(self, pid, os.pidfd_open(pid), out, err)

    def collect(self, pid: int) -> int:
        """The exit status of a child that has ended, as subprocess gives it."""
        with self._lock:
            return self._ask({"collect": pid})

    def _ask(self, asked: dict[str, Any]) -> int:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(asked).encode() + b"\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        assert line, "the forking process has ended"
        return int(line)

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait(30)


def _import_everything() -> None:
    """Import what any command may need, with the fault points writing themselves down."""
    from lionwt import faults
    from tests.crash import steps

    real = faults.point

    def point(name: str) -> None:
        steps.note("point", name)
        real(name)

    faults.point = point
    import lionwt

    for module in pkgutil.iter_modules(lionwt.__path__):
        if module.name not in ("turn", "lionagi", "completion"):
            importlib.import_module(f"lionwt.{module.name}")
    for name in ("concurrent.futures.thread", "filelock", "psutil", "json", "tempfile", "shutil"):
        importlib.import_module(name)


def _serve() -> None:
    _import_everything()
    reading, writing = sys.stdin.buffer, sys.stdout.buffer
    while line := reading.readline():
        asked = json.loads(line)
        if "collect" in asked:
            _, status = os.waitpid(asked["collect"], 0)
            told = os.waitstatus_to_exitcode(status)
        else:
            told = os.fork()
            if told == 0:
                _run(asked)
        writing.write(b"%d\n" % told)
        writing.flush()


def _run(asked: dict[str, Any]) -> None:
    code = 1
    try:
        os.setsid()
        for number, name, flags in (
            (0, os.devnull, os.O_RDONLY),
            (1, asked["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            (2, asked["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        ):
            fd = os.open(name, flags, 0o600)
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.argv = ["lionwt", *asked["arguments"]]
        if trace := asked["env"].get("LIONWT_TRACE"):
            from tests.crash import steps

            steps.begin(trace)
        from lionwt.__main__ import main

        code = main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()

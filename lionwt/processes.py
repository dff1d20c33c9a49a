"""Who still works in a lease, and stopping them.

A worker's processes are known by their environment: they carry both of the
lease's ids (ADR-0091 D2 pins them). A process that merely stands in the
worktree is somebody's shell or editor: it makes the lease busy and is never
touched. lionwt itself and its ancestors are exempt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lionwt import words
from lionwt.errors import LionwtError
from lionwt.names import RunPaths
from lionwt.records import Owner
from lionwt.values import Value

if TYPE_CHECKING:
    import psutil

#: Seconds a worker gets to stop by itself.
DEFAULT_STOP_AFTER: Final = 10.0
#: Seconds until a killed process must be gone.
_KILL_WAIT: Final = 10.0


class Worker(Value, frozen=True):
    """A process of the lease; pid and start time name it for good."""

    pid: int
    started: float
    name: str


#: On Linux the kernel's own files are asked first, and psutil only about what they point to.
_LINUX: Final = sys.platform.startswith("linux")


def _mine() -> set[int]:
    """lionwt and its ancestors."""
    exempt = {os.getpid()}
    pid = os.getppid()
    while pid and pid not in exempt:
        exempt.add(pid)
        pid = _parent(pid)
    return exempt


def _parent(pid: int) -> int:
    if _LINUX:
        with contextlib.suppress(OSError):
            return int(_stat(pid)[1])
        return 0
    import psutil

    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).ppid())
    return 0


def _stat(pid: int) -> list[bytes]:
    """The fields of a process after its name: state, parent, ... (proc(5)); raises ``OSError``."""
    content = Path(f"/proc/{pid}/stat").read_bytes()
    # The second field is the name, in parentheses, and may hold anything.
    return content.rpartition(b")")[2].split()


def _living(seems: Callable[[int], bool]) -> Iterator[psutil.Process]:
    """Every other living process; on Linux those for whose pid ``seems`` holds."""
    exempt = _mine()
    if _LINUX:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        found = [pid for pid in pids if pid not in exempt and _holds(seems, pid)]
        if not found:
            return
    import psutil

    for pid in found if _LINUX else psutil.pids():
        if pid not in exempt:
            with contextlib.suppress(psutil.Error):
                yield psutil.Process(pid)


def _holds(seems: Callable[[int], bool], pid: int) -> bool:
    try:
        return seems(pid)
    except OSError:
        return False


def _carries(mark: str) -> Callable[[int], bool]:
    sought = os.fsencode(mark)
    return lambda pid: sought in Path(f"/proc/{pid}/environ").read_bytes()


def _unreadable() -> tuple[type[BaseException], ...]:
    """What a look at a process that ends, or is somebody else's, raises."""
    import psutil

    return psutil.Error, OSError


def _belongs(process: psutil.Process, run: RunPaths, worker_id: str) -> bool:
    environ = process.environ()
    return environ.get("LIONAGI_WORKER_ID") == worker_id and _is_of_run(environ, run) and _runs(process)


def _is_of_run(environ: Mapping[str, str], run: RunPaths) -> bool:
    """Whether a process with ``environ`` works in ``run``.

    Ids are unique under one LIONAGI_HOME only: a process whose own home holds
    another run of that id belongs to that one, and must not be touched.
    """
    if environ.get("LIONAGI_RUN_ID") != run.run_id:
        return False
    home = environ.get("LIONAGI_HOME") or os.path.join(environ.get("HOME", "/"), ".lionagi")
    its_own = os.path.realpath(os.path.join(home, "runs", run.run_id))
    return its_own == str(run.state_root) or not os.path.exists(os.path.join(its_own, run.run_file.name))


def _runs(process: psutil.Process) -> bool:
    return bool(process.status() != "zombie")


def _started(pid: int) -> float:
    """When a process started, so that with its pid it is named for good; raises ``OSError``.

    On Linux in ticks since the boot: psutil adds the time of the boot, which
    moves whenever the clock is set, and then nobody would be alive any more.
    """
    if _LINUX:
        return float(_stat(pid)[19])
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError from error
    except psutil.Error as error:
        raise PermissionError from error


def _is_zombie(pid: int) -> bool:
    if _LINUX:
        return _stat(pid)[0] == b"Z"
    import psutil

    return not _runs(psutil.Process(pid))


def workers(run: RunPaths, worker_id: str) -> list[Worker]:
    """The living processes that carry both ids."""
    found = []
    for process in _living(_carries(f"LIONAGI_WORKER_ID={worker_id}")):
        with contextlib.suppress(*_unreadable()):
            if _belongs(process, run, worker_id):
                found.append(Worker(process.pid, _started(process.pid), process.name()))
    return found


def of_run(run: RunPaths) -> dict[str, list[Worker]]:
    """The living processes of a run's workers, by worker id, from one look at the machine."""
    found: dict[str, list[Worker]] = {}
    for process in _living(_carries(f"LIONAGI_RUN_ID={run.run_id}")):
        with contextlib.suppress(*_unreadable()):
            environ = process.environ()
            worker_id = environ.get("LIONAGI_WORKER_ID")
            if worker_id and _is_of_run(environ, run) and _runs(process):
                found.setdefault(worker_id, []).append(Worker(process.pid, _started(process.pid), process.name()))
    return found


def standing_in(path: Path) -> list[Worker]:
    """The living processes whose current directory is in ``path``."""
    prefix = str(path)
    found = []
    for process in _living(lambda pid: os.readlink(f"/proc/{pid}/cwd").startswith(prefix)):
        with contextlib.suppress(*_unreadable()):
            cwd = process.cwd()
            if cwd == prefix or cwd.startswith(prefix + "/"):
                found.append(Worker(process.pid, _started(process.pid), process.name()))
    return found


def stop(run: RunPaths, worker_id: str, worktree: Path, stop_after: float) -> None:
    """Make sure that nothing of the lease goes on writing (design section 7, freeze 1).

    The worker's processes are asked to stop, and killed after ``stop_after``
    seconds; with 0 nothing is asked. Raises ``worker_alive``, naming them, when
    something is left.
    """
    asked: set[tuple[int, float]] = set()
    deadline = time.monotonic() + stop_after
    while found := workers(run, worker_id):
        if stop_after <= 0:
            raise alive(worker_id, found, "still runs")
        if time.monotonic() >= deadline:
            _kill(run, worker_id)
            break
        for worker in found:
            if (worker.pid, worker.started) not in asked:
                asked.add((worker.pid, worker.started))
                _signal(worker, run, worker_id, signal.SIGTERM)
        time.sleep(0.02)
    if standing := standing_in(worktree):
        raise alive(worker_id, standing, "stands in the worktree")


def _kill(run: RunPaths, worker_id: str) -> None:
    deadline = time.monotonic() + _KILL_WAIT
    while found := workers(run, worker_id):
        if time.monotonic() >= deadline:
            raise alive(worker_id, found, "does not die")
        for worker in found:
            _signal(worker, run, worker_id, signal.SIGKILL)
        time.sleep(0.02)


def _signal(worker: Worker, run: RunPaths, worker_id: str, number: signal.Signals) -> None:
    """Signal exactly that process: never one that has got its pid since."""
    import psutil

    try:
        handle = os.pidfd_open(worker.pid)
    except OSError:
        return
    except AttributeError:  # not on Linux
        handle = -1
    try:
        with contextlib.suppress(*_unreadable()):
            process = psutil.Process(worker.pid)
            if _started(worker.pid) != worker.started or not _belongs(process, run, worker_id):
                return
            if handle < 0:
                process.send_signal(number)
            else:
                signal.pidfd_send_signal(handle, number)
    finally:
        if handle >= 0:
            os.close(handle)


def alive(
    worker_id: str,
    found: list[Worker],
    doing: str,
    left: str = "nothing was changed",
    hint: str = "let it end or stop it, then run the same command again",
) -> LionwtError:
    who = words.some((f"{worker.name} (pid {worker.pid})" for worker in found), 8)
    return LionwtError(
        "worker_alive",
        f"{who} {doing} of {worker_id!r}; {left}",
        hint=hint,
        diagnostics={"pids": [worker.pid for worker in found]},
    )


def require_none(run: RunPaths, worker_id: str, worktree: Path, left: str) -> None:
    """Raise ``worker_alive`` when something of the lease runs or stands in its worktree; nothing is stopped."""
    if found := workers(run, worker_id):
        raise alive(worker_id, found, "still works in the lease", left)
    if found := standing_in(worktree):
        raise alive(worker_id, found, "stands in the worktree", left)


def boot_id() -> str:
    """What tells one boot of this machine from another."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        import psutil

        return str(int(psutil.boot_time()))


def owner(pid: int) -> Owner:
    """Identify the process that answers for a lease; raises ``usage`` when there is none."""
    try:
        started = _started(pid)
    except OSError as error:
        raise LionwtError("usage", f"--owner-pid {pid}: there is no such process; nothing was made") from error
    return Owner(host=os.uname().nodename, boot=boot_id(), pid=pid, started=started)


def owner_alive(owner: Owner) -> bool:
    """Whether the owner still lives; on another host nobody can tell, so it counts as alive."""
    if owner.host != os.uname().nodename:
        return True
    if owner.boot != boot_id():
        return False
    try:
        return _started(owner.pid) == owner.started and not _is_zombie(owner.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True

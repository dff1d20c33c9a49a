"""Run the checks that people declare: in a worker's worktree, or on the tree that a landing would make.

A check is a shell command of the run's, never a worker's. It gets the caller's
environment without ``GIT_*`` and ``LIONWT_*``, and the lease's three ids, by which
whatever it leaves running is found and ended; no lock is inherited. It may take
so many seconds, then its process group is ended and it counts as red. What it
says goes into a log among the evidence, never to a terminal (design section 7,
freeze 2 and promote 4).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from lionwt import git, processes, words
from lionwt.errors import LionwtError, from_os_error
from lionwt.records import Binding, Check, LeaseFile, Validation
from lionwt.session import Run
from lionwt.store import make_own_dir, move_file, sync_dir
from lionwt.values import Value

#: Of a log this much is kept (bytes); a check that says more goes on, unheard.
LARGEST_LOG: Final = 16 << 20
#: Seconds between asking a check to end and killing it.
GRACE: Final = 5.0


class Ran(Value, frozen=True):
    """How one check ended; ``exit_code`` is None where it had to be ended."""

    check: Check
    exit_code: int | None
    log: str

    @property
    def passed(self) -> bool:
        return self.exit_code == 0

    @property
    def told(self) -> str:
        """How it ended, in words."""
        if self.exit_code is None:
            return f"did not end within {self.check.timeout:g} s and was stopped"
        return "passed" if self.passed else f"ended with exit code {self.exit_code}"

    def validation(self) -> Validation:
        return Validation(name=self.check.name, passed=self.passed, exit_code=self.exit_code, evidence_ref=self.log)


def in_worktree(run: Run, file: LeaseFile, checks: Sequence[Check], scratch: Path) -> tuple[Ran, ...]:
    """Run checks in the worker's worktree; whether they changed it the caller finds by another look."""
    return tuple(
        _run(run, file, check, file.lease.worktree_path, scratch, f"check-{number}.log")
        for number, check in enumerate(checks, 1)
    )


def on_merge(run: Run, file: LeaseFile, expected: str, tree: str) -> tuple[Ran, ...]:
    """Run the run's merge checks on a merged tree, in a scratch worktree. Call under the lease's lock, no other."""
    assert file.evidence is not None
    found = []
    for number, check in enumerate(run.file.merged_checks, 1):
        with run.scratch(file.worker_id) as scratch:
            where = scratch / "tree"
            _make_tree(run, file, expected, tree, where)
            found.append(_run(run, file, check, where, scratch, f"merged-{number}.log"))
    return tuple(found)


def _make_tree(run: Run, file: LeaseFile, expected: str, tree: str, where: Path) -> None:
    """The merged tree as a repository of its own: what git does there touches nobody else's."""
    assert file.evidence is not None
    commit = run.commit_tree(tree, [expected, file.evidence.commit], f"{file.worker_id}: merged, to be checked\n")
    own = where / ".git"
    for sub in ("objects/info", "refs/heads"):
        (own / sub).mkdir(parents=True)
    (own / "objects" / "info" / "alternates").write_bytes(os.fsencode(git.quoted(run.common_dir / "objects")) + b"\n")
    extra = "[extensions]\n\tobjectformat = sha256\n" if run.file.object_format == "sha256" else ""
    (own / "config").write_text(f"[core]\n\trepositoryformatversion = {1 if extra else 0}\n{extra}[gc]\n\tauto = 0\n")
    (own / "HEAD").write_text(f"{commit}\n")
    shallow = run.paths.git_dir / "shallow"
    if shallow.is_file():
        (own / "shallow").write_bytes(shallow.read_bytes())
    private = git.private(run.paths.git_dir, run.common_dir, work_tree=where, index=own / "index")
    private.run("read-tree", "-m", "-u", commit, timeout=git.CONTENT)


def _run(run: Run, file: LeaseFile, check: Check, where: Path, scratch: Path, name: str) -> Ran:
    target = run.paths.evidence(file.worker_id)
    made = scratch / name
    try:
        make_own_dir(target)
        with open(made, "wb", opener=lambda p, f: os.open(p, f, 0o600)) as log:
            exit_code = _end(check, where, _environment(os.environ, file), log)
        # What left the group still carries the ids.
        processes.stop(run.paths, file.worker_id, where, GRACE)
        move_file(made, target / name)
        sync_dir(target)
    except OSError as error:
        raise from_os_error(
            error, f"running check {check.name!r} of {file.worker_id!r}; nothing was changed"
        ) from error
    return Ran(check, exit_code, run.paths.ref(target / name))


def _environment(environ: Mapping[str, str], file: LeaseFile) -> dict[str, str]:
    kept = {key: value for key, value in environ.items() if not key.startswith(("GIT_", "LIONWT_"))}
    return {**kept, **Binding.of(file.lease).env}


def _end(check: Check, where: Path, env: Mapping[str, str], log: IO[bytes]) -> int | None:
    """Run one check to its end or its time; returns its exit code, or None."""
    child = subprocess.Popen(
        ["/bin/sh", "-c", check.command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        cwd=where,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        with child.stdout as said:
            if _listen(child, said, log, time.monotonic() + check.timeout):
                return child.returncode
            _signal_group(child, signal.SIGTERM)
            _listen(child, said, log, time.monotonic() + GRACE)
            return None
    finally:
        _signal_group(child, signal.SIGKILL)  # whatever is left of it, also of one that ended by itself
        child.wait()


def _listen(child: subprocess.Popen[bytes], said: IO[bytes], log: IO[bytes], deadline: float) -> bool:
    """Write down what a check says until it has ended; False where the time is over before."""
    os.set_blocking(said.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(said, selectors.EVENT_READ)
        open_ = True
        while True:
            ended = child.poll() is not None
            # Something that it left may hold the pipe for ever: its own end is what counts.
            if open_ and selector.select(0 if ended else min(0.05, max(deadline - time.monotonic(), 0))):
                open_ = _write_down(said, log)
                if not open_:
                    selector.unregister(said)
            elif ended:
                return True
            elif not open_:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(min(0.05, max(deadline - time.monotonic(), 0)))
            if time.monotonic() >= deadline:
                return child.poll() is not None


def _write_down(said: IO[bytes], log: IO[bytes]) -> bool:
    block = said.read(1 << 16)
    if not block:
        return False
    room = LARGEST_LOG - log.tell()
    log.write(block[:room] if room > 0 else b"")
    return True


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def wrote(file: LeaseFile, names_of: Sequence[str], paths: Sequence[str]) -> LionwtError:
    """The error of checks that changed the worktree: what they wrote must not become the worker's."""
    shown = words.some(repr(path) for path in paths)
    return LionwtError(
        "check_wrote",
        f"the checks of {file.worker_id!r} ({', '.join(names_of)}) changed its worktree: {shown}; "
        "nothing was frozen, and what they wrote was left",
        hint="undo it there, let the checks write elsewhere, then freeze again; "
        f"see: {words.command('git', '-C', file.lease.worktree_path, 'status')}",
    )

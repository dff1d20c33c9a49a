"""What ``reconcile`` and ``reap`` find and leave to a person: named, with what to type, and never touched.

Worktrees, registrations, branches and anchors without a lease file among it; all
of it is read from files and from refs that one git process lists (design section 8).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lionwt import names, registration, repository, teardown, words
from lionwt.errors import CODES, LionwtError
from lionwt.records import LeaseFile
from lionwt.session import Run
from lionwt.values import Value


class Finding(Value, frozen=True):
    """Something that is not as it should be and that a person decides about; ``code`` and ``hint`` as an error's."""

    code: str
    message: str
    worker_id: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, error: LionwtError, worker_id: str | None = None) -> Finding:
        return cls(error.code, error.message, worker_id, error.hint)

    @property
    def exit_code(self) -> int:
        return CODES[self.code].exit_code


def refs_of(run: Run) -> dict[str, repository.Branch]:
    """Every branch and anchor of the run, from one git process."""
    run_id = run.file.run_id
    return repository.find_branches(str(run.common_dir), f"refs/heads/lionagi/{run_id}/", f"refs/lionwt/{run_id}/")


def find_orphans(run: Run, named: set[str], refs: dict[str, repository.Branch] | None = None) -> list[Finding]:
    """Worktrees, registrations, branches and anchors of the run that no lease file speaks of: named, never touched."""
    left = _unnamed(run, named, refs_of(run) if refs is None else refs)
    return [_orphan(run, worker_id, left[worker_id]) for worker_id in sorted(left)]


class Left(Value, frozen=True):
    """One thing that no lease file speaks of, and the command that removes it."""

    what: str
    removal: str


def _unnamed(run: Run, named: set[str], refs: dict[str, repository.Branch]) -> dict[str, list[Left]]:
    """What there is of workers that are not ``named``, in the order in which it can be removed.

    Worktrees come first, the inner before the outer: a branch that is
    registered as checked out cannot be deleted, whether or not the worktree is
    there. Everything is a file or was read already: no git process is started.
    """
    git = ("git", "-C", run.main_worktree)
    directory = names.worktree_path(run.main_worktree, run.file.run_id, "x").parent
    left: dict[str, list[Left]] = {}

    def found(worker_id: str, what: object, *removal: str | Path) -> None:
        if worker_id not in named:
            left.setdefault(worker_id, []).append(Left(str(what), words.command(*removal)))

    known = sorted(registration.registered(run.common_dir), reverse=True)
    for path, admin in known:
        if directory in path.parents:
            worker_id = path.relative_to(directory).parts[0]
            if os.path.lexists(path) and (path.is_symlink() or repository.git_dir_of(path) != admin):
                found(worker_id, path, "rm", "-r", path)  # git removes no directory that is not its own
            found(worker_id, path, *git, "worktree", "remove", "-f", "-f", path)
    registered = {path for path, _ in known}
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(directory)):
            if directory / entry not in registered:
                found(entry, directory / entry, "rm", "-r", directory / entry)
    for full in sorted(refs):
        if full.startswith(names.HEADS):
            found(full.split("/")[4], full, *git, "branch", "-D", names.short_branch(full))
        else:
            found(full.split("/")[3], full, *git, "update-ref", "-d", full)
    return left


def _orphan(run: Run, worker_id: str, left: list[Left]) -> Finding:
    """The removal never ends the hint: what ends it is what a program may type next."""
    things = list(dict.fromkeys(entry.what for entry in left))
    ref = next((thing for thing in things if thing.startswith("refs/")), None)
    look = "look into it first"
    if ref is not None:
        look = f"look at it first: {words.command('git', '-C', run.main_worktree, 'log', ref, '--')}"
    return Finding(
        "orphan",
        f"worker {worker_id!r} has no lease file, but there is {words.some(things)}, "
        "and nobody can tell whether its work is wanted; it was kept",
        worker_id,
        f"if nobody wants it, {' && '.join(entry.removal for entry in left)} removes it; {look}",
    )


def clock_is_wrong(file: LeaseFile, now: float) -> Finding:
    """The finding of a clock that stands before the lease was made: nothing is deleted by it."""
    return Finding.of(teardown.clock_is_wrong(file, now), file.worker_id)


def trash_left(run: Run, reasons: list[str]) -> list[Finding]:
    """The findings of what could not be deleted from the trash."""
    hint = f"clear what is named, then: lionwt reap {run.argument}"
    return [Finding("teardown_failed", f"the trash could not be emptied: {why}", hint=hint) for why in reasons]

"""``freeze``: turn what a worker did into immutable evidence (ADR-0091 D3, design section 7).

In this order, and for these reasons: the worker's processes end first, so that
the tree stands still; the tree is captured until two looks agree; patch and
manifest are made durable and proven before anything says that they are there;
the candidate's commit is anchored in the shared store before the lease names
it; the lease file, written last, is what makes it a candidate. Whatever fails
before that leaves the lease running and the worktree as it was, and the freeze
can be repeated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lionwt import (
    checks,
    evidence,
    git,
    history,
    names,
    processes,
    repository,
    submodules,
    teardown,
    trash,
    words,
    worktree,
)
from lionwt.capture import Capture, Capturer
from lionwt.errors import LionwtError, from_os_error, leaving
from lionwt.evidence import Change, Notes
from lionwt.faults import point
from lionwt.records import Candidate, Check, Evidence, Identity, LeaseFile, Validation
from lionwt.session import Run
from lionwt.store import make_own_dir, move_file, sync_dir
from lionwt.together import meanwhile
from lionwt.values import Value

PATCH, MANIFEST, SAVED, COMMITS = "candidate.patch", "manifest.json", "saved.tar", "commits.bundle"


class Verdict(Value, frozen=True):
    """How the worker ended, as its caller says."""

    succeeded: bool
    cancelled: bool = False
    validations: Sequence[Validation] = ()
    accept_incomplete: bool = False
    stop_after: float = processes.DEFAULT_STOP_AFTER
    checks: Sequence[Check] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for name in (*(result.name for result in self.validations), *(check.name for check in self.checks)):
            if name in seen:
                raise LionwtError(
                    "usage", f"validation {name!r} was given twice; nothing was changed", hint="give it once"
                )
            seen.add(name)
        if self.succeeded and self.cancelled:
            raise LionwtError("usage", "a worker cannot have succeeded and been cancelled; nothing was changed")
        if self.accept_incomplete and self.succeeded:
            raise LionwtError(
                "usage",
                "--accept-incomplete goes with --failed or --cancelled only; nothing was changed",
                hint="an incomplete capture is never landed",
            )


def freeze(run: Run, worker_id: str, verdict: Verdict) -> LeaseFile:
    """running → frozen; an allocated lease that failed or was cancelled ends here.

    Raises ``worker_alive``, ``worktree_changing``, ``patch_missing``,
    ``embedded_repository``, ``worktree_moved``, ``wrong_state``,
    ``already_done``. Repeated with the same verdict it answers the same.
    """
    with run.locked(worker_id) as file:
        if file.candidate is not None or file.lease.state == "terminal":
            return _answer_again(file, verdict)
        frozen = freeze_locked(run, file, verdict)
    if frozen.lease.state == "terminal":
        trash.clear(run)
    return frozen


def freeze_locked(run: Run, file: LeaseFile, verdict: Verdict) -> LeaseFile:
    """Freeze a lease whose lock is held and that has not been frozen yet."""
    worker_id = file.worker_id
    if file.intent is not None:
        raise LionwtError(
            "wrong_state",
            f"the allocation of {worker_id!r} was not finished; nothing was changed",
            hint=f"finish what was interrupted: lionwt reconcile {run.argument}",
        )
    if file.lease.state == "allocated" and verdict.succeeded:
        raise LionwtError(
            "wrong_state",
            f"worker {worker_id!r} was never started, so it cannot have succeeded; nothing was changed",
            hint=f"start it first: lionwt start {run.argument} {worker_id}",
        )
    identity = worktree.require_identity(file, registered=False)
    processes.stop(run.paths, worker_id, file.lease.worktree_path, verdict.stop_after)
    point("freeze.stopped")
    with leaving("the lease and the worktree are as they were"):
        proof = capture_evidence(run, file, identity, verdict)
    frozen = _frozen(run, file, verdict, proof)
    if file.lease.state == "allocated":
        return teardown.end_unstarted(run, frozen)
    written = run.store.write(frozen)
    point("freeze.recorded")
    return written


def _answer_again(file: LeaseFile, verdict: Verdict) -> LeaseFile:
    candidate = file.candidate
    if candidate is None:
        ended = file.lease.state == "terminal" and not any(step.state == "running" for step in file.history)
        if ended and not verdict.succeeded:
            return file
        raise LionwtError(
            "wrong_state",
            f"the lease of {file.worker_id!r} has ended without a candidate; nothing was changed",
            hint=f"see what became of it: {file.lease.state_path}",
        )
    same = (
        candidate.worker_succeeded == verdict.succeeded
        and candidate.cancelled == verdict.cancelled
        and sorted(_given(candidate, verdict), key=lambda result: result.name)
        == sorted(verdict.validations, key=lambda result: result.name)
        and {check.name for check in verdict.checks} <= {result.name for result in candidate.validations}
    )
    if same:
        return file
    raise LionwtError(
        "already_done",
        f"worker {file.worker_id!r} was frozen with another verdict; nothing was changed",
        hint="a frozen candidate is immutable; promote it, or lease a new worker",
    )


def _given(candidate: Candidate, verdict: Verdict) -> list[Validation]:
    """The validations that the caller gave; how its checks ended is not run again."""
    checked = {check.name for check in verdict.checks}
    return [result for result in candidate.validations if result.name not in checked]


class Patch(NamedTuple):
    """A patch that was written; ``size`` in bytes."""

    sha256: str
    size: int


class Proof(Value, frozen=True):
    """What a capture made durable."""

    patch_sha256: str
    changes: tuple[Change, ...]
    evidence: Evidence
    diagnostics: tuple[tuple[str, str], ...]
    ref_prefix: str
    ran: tuple[checks.Ran, ...] = ()


def capture_evidence(run: Run, file: LeaseFile, identity: Identity, verdict: Verdict) -> Proof:
    """Capture the worktree and make patch, manifest, saved files and anchors durable."""
    target = run.paths.evidence(file.worker_id)
    try:
        make_own_dir(target)
        with run.scratch(file.worker_id) as scratch:
            began_ns = time.time_ns()
            capture = Capturer(run.file, run.paths, file, identity, scratch).capture()
            point("freeze.captured")
            ran = checks.in_worktree(run, file, verdict.checks, scratch)
            if ran:
                capture = _unchanged(run, file, identity, capture, scratch / "again", ran)
            private = run.private()
            patch = Patch(*evidence.write_patch(private, run.file.base_sha, capture.tree, scratch / PATCH))
            changes = evidence.changes_between(private, run.file.base_sha, capture.tree)

            def prove(stopped: int) -> None:
                evidence.prove(private.stopped_by(stopped), changes, scratch / "proof", scratch / PATCH, patch.size)

            with meanwhile(prove) as proven:
                proof = _write_evidence(
                    run, file, identity, verdict, capture, patch, changes, proven, scratch, target, began_ns, ran
                )
            sync_dir(target)
            sync_dir(target.parent)
            point("freeze.evidence")
    except OSError as error:
        raise from_os_error(error, f"capturing {file.worker_id!r}") from error
    _anchor(run, file, proof.evidence)
    point("freeze.anchored")
    return proof


def _unchanged(
    run: Run, file: LeaseFile, identity: Identity, before: Capture, scratch: Path, ran: Sequence[checks.Ran]
) -> Capture:
    """Another look after the checks; raises ``check_wrote`` where the tree is not what it was."""
    scratch.mkdir()
    after = Capturer(run.file, run.paths, file, identity, scratch).capture()
    if after.tree != before.tree:
        changed = evidence.changes_between(run.private(), before.tree, after.tree)
        paths = [git.text(change.path) for change in changed]
        raise checks.wrote(file, [one.check.name for one in ran], paths)
    return after


def _write_evidence(
    run: Run,
    file: LeaseFile,
    identity: Identity,
    verdict: Verdict,
    capture: Capture,
    patch: Patch,
    changes: Sequence[Change],
    proven: Callable[[], None],
    scratch: Path,
    target: Path,
    began_ns: int,
    ran: tuple[checks.Ran, ...],
) -> Proof:
    base, root = run.file.base_sha, file.lease.worktree_path
    past = history.read(run.file, run.paths.git_dir, file, identity, _recorded_elsewhere(run, file))
    notes = Notes()
    notes.diagnostics += past.notes
    notes.diagnostics += repository.changes_of_shared_config(run.file).items()
    saver = evidence.Saver(root, scratch / SAVED)
    inside = submodules.look(run.file, run.paths, file, identity, capture, scratch, target)
    if not os.path.lexists(identity.admin_dir):
        gone = f"the registration {identity.admin_dir} is gone, and with it what HEAD and the index said"
        notes.incomplete.append(("registration_gone", gone))
    notes.incomplete += inside.unsaved + _incomplete(root, capture)
    if notes.incomplete and not verdict.accept_incomplete:
        code = next((c for c, _ in notes.incomplete if c == "embedded_repository"), "patch_missing")
        raise LionwtError(
            code,
            f"the change of {file.worker_id!r} cannot be captured whole: "
            + words.some((message for _, message in notes.incomplete), 5, "; ")
            + "; the lease and the worktree are as they were",
            hint="mend or remove what is named, then freeze again; or give it up with "
            "--failed --accept-incomplete, which keeps the raw files",
        )
    dirty_submodules = capture.submodules if inside.unsaved else ()
    for name in (*capture.repositories, *capture.shadowed, *capture.unreadable, *capture.refused, *dirty_submodules):
        saver.add(name)
    converted = evidence.converted(run.file, root, capture, saver)
    left_out = [*capture.left_out, *inside.ignored]
    special = {**capture.special, **inside.special}
    ignored = evidence.ignored(root, left_out, saver)
    saver.close()
    has_commits = history.save_commits(run.file, run.paths.git_dir, scratch / "git", past.tips, scratch / COMMITS)
    keep_line = past.is_line and past.blocker is None
    commit = _candidate_commit(run, file, capture.tree, past, keep_line, bool(changes))
    blocker = _blocker(past, capture, identity)
    if blocker:
        notes.diagnostics.append(("worktree_unmerged", blocker))
    notes.diagnostics += _about_files(root, identity, changes, len(special), len(left_out))
    notes.diagnostics += [(code, f"given up: {message}") for code, message in notes.incomplete]
    proven()
    _place(scratch, target, has_commits)
    manifest = {
        "schema": evidence.MANIFEST_SCHEMA,
        "run_id": run.file.run_id,
        "worker_id": file.worker_id,
        "began_ns": began_ns,
        "base": base,
        "tree": capture.tree,
        "commit": commit,
        "complete": not notes.incomplete,
        "patch": {"ref": run.paths.ref(target / PATCH), "sha256": patch.sha256, "bytes": patch.size},
        "head": {"commit": past.head, "ref": past.head_ref, "branch_tip": past.branch_tip},
        "commits": {
            "kept": list(past.line) if keep_line else [],
            "bundle": run.paths.ref(target / COMMITS) if has_commits else None,
            "tips": list(past.tips),
        },
        "files": [_file_row(change) for change in changes],
        "converted": converted,
        "ignored": ignored,
        "not_captured": {
            "special": {git.text(name): kind for name, kind in special.items()},
            "empty_directories": [git.text(name) for name in (*capture.empty_dirs, *inside.empty_dirs)],
            "repositories": [git.text(name) or "." for name in capture.repositories],
            "in_submodules": [git.text(name) for name in capture.shadowed],
            "unreadable": [git.text(name) for name in capture.unreadable],
            "refused": [git.text(name) for name in capture.refused],
            "not_saved": saver.failed,
        },
        "submodules": inside.rows,
        "index_flags": [git.text(name) for name in capture.flagged],
        "sparse": [git.text(name) for name in capture.sparse],
        "unmerged": [git.text(name) for name in capture.unmerged],
        "saved": run.paths.ref(target / SAVED) if (target / SAVED).exists() else None,
        "kept": evidence.digests(
            target, [SAVED, COMMITS, *(row["bundle"].rpartition("/")[2] for row in inside.rows if row["bundle"])]
        ),
        "checks": [_check_row(one, run.paths.artifact_root) for one in ran],
        "artifacts": evidence.artifact_files(file.lease.artifact_path),
        "diagnostics": [{"code": code, "message": message} for code, message in notes.diagnostics],
    }
    manifest_sha256 = evidence.write_manifest(target / MANIFEST, manifest)
    evidence.require_proven(target / PATCH, patch.sha256, patch.size)
    return Proof(
        patch_sha256=patch.sha256,
        changes=tuple(changes),
        evidence=Evidence(
            tree=capture.tree,
            commit=commit,
            head=past.head,
            branch_tip=past.branch_tip,
            manifest_sha256=manifest_sha256,
            blocker=blocker,
        ),
        diagnostics=tuple(notes.diagnostics),
        ref_prefix=run.paths.ref(target),
        ran=ran,
    )


def _recorded_elsewhere(run: Run, file: LeaseFile) -> list[str]:
    """The commits that the evidence of the run's other leases names."""
    files, _ = run.store.leases(run.file)
    proofs = [other.evidence for other in files if other.worker_id != file.worker_id and other.evidence is not None]
    return [oid for proof in proofs for oid in (proof.head, proof.branch_tip, proof.commit) if oid]


def _incomplete(root: Path, capture: Capture) -> list[tuple[str, str]]:
    found = [
        ("embedded_repository", f"{git.text(name) or 'the worktree itself'} is a repository of its own")
        for name in capture.repositories
    ]
    for code, what, told in (
        ("files_in_submodule", capture.shadowed, "lies where a submodule belongs"),
        ("unreadable", capture.unreadable, "cannot be read"),
        ("refused_by_git", capture.refused, "is not taken by git"),
    ):
        found += [(code, f"{words.short(git.text(name))} {told}") for name in what]
    if capture.index_broken:
        found.append(("index_unreadable", f"the worker's index cannot be read ({capture.index_broken})"))
    return found


def _blocker(past: history.History, capture: Capture, identity: Identity) -> str | None:
    """Why the captured content must not be landed, whatever it is."""
    if running := history.in_progress(Path(identity.admin_dir)):
        return f"the worktree was frozen in the middle of {' and '.join(running)}"
    if capture.unmerged:
        unmerged = words.count(len(capture.unmerged), "path is", "paths are")
        return f"{unmerged} unmerged: {words.some(map(git.text, capture.unmerged))}"
    return past.blocker


def _about_files(
    root: Path, identity: Identity, changes: Sequence[Change], special: int, left_out: int
) -> list[tuple[str, str]]:
    found = []
    if repository.git_dir_of(root) != Path(identity.admin_dir) or (root / ".git").is_symlink():
        found.append(("git_file_changed", "the worktree's .git file was removed or replaced"))
    for change in changes:
        if change.new.mode == "120000" and (leads := evidence.leaves_worktree(root, change.path)):
            found.append(("symlink_leaves_worktree", f"{git.text(change.path)} points to {leads}"))
    if special:
        named = words.count(special, "FIFO, socket or device is", "FIFOs, sockets or devices are")
        found.append(("special_files", f"{named} not in the tree"))
    if left_out:
        named = words.count(left_out, "ignored file is", "ignored files are")
        found.append(("ignored_files", f"{named} not in the tree"))
    return found


def _file_row(change: Change) -> dict[str, Any]:
    return {
        "path": git.text(change.path),
        "status": change.status,
        "old": {"mode": change.old.mode, "oid": change.old.oid},
        "new": {"mode": change.new.mode, "oid": change.new.oid},
    }


def _check_row(one: checks.Ran, artifact_root: Path) -> dict[str, Any]:
    return {
        "name": one.check.name,
        "command": one.check.command,
        "exit_code": one.exit_code,
        "log": one.log,
        "log_sha256": evidence.sha256_of(artifact_root / one.log)[0],
    }


def _candidate_commit(
    run: Run, file: LeaseFile, tree: str, past: history.History, keep_line: bool, changed: bool
) -> str:
    """The commit to land: the worker's own line where it is one, else one commit on the base."""
    base = run.file.base_sha
    parent = past.head if keep_line and past.head else base
    if parent != base and run.private().oid("rev-parse", "--verify", f"{parent}^{{tree}}") == tree:
        return parent
    if not changed:
        return base
    message = (
        f"{file.worker_id}: change set of run {run.file.run_id}\n\n"
        f"Lionwt-Run: {run.file.run_id}\nLionwt-Worker: {file.worker_id}\n"
    )
    return run.commit_tree(tree, [parent], message)


def _place(scratch: Path, target: Path, has_commits: bool) -> None:
    """Move the finished files to where the record will name them; leftovers of a failed try go."""
    for name in (PATCH, SAVED, COMMITS):
        made = scratch / name
        if made.exists() and (name != COMMITS or has_commits):
            move_file(made, target / name)
        else:
            (target / name).unlink(missing_ok=True)


def _anchor(run: Run, file: LeaseFile, proof: Evidence) -> None:
    """Keep the candidate and the worker's head from any gc until the record is terminal."""
    prefix = names.anchor_prefix(run.file.run_id, file.worker_id)
    wanted = {"candidate": proof.commit, "head": proof.head}
    commands = [f"update {prefix}{name}\0{oid}\0\0".encode("ascii") for name, oid in wanted.items() if oid is not None]
    result = git.update_refs(git.shared(str(run.common_dir)), commands)
    if result.code:
        raise git.failure(["update-ref"], result)


def _frozen(run: Run, file: LeaseFile, verdict: Verdict, proof: Proof) -> LeaseFile:
    """The frozen lease file with its candidate."""
    lease = file.lease.having(state="frozen")
    prefix = proof.ref_prefix
    candidate = Candidate(
        lease=lease,
        patch_ref=f"{prefix}/{PATCH}",
        patch_sha256=proof.patch_sha256,
        files_changed=tuple(git.text(change.path) for change in proof.changes),
        artifact_manifest_ref=f"{prefix}/{MANIFEST}",
        validations=(*verdict.validations, *(one.validation() for one in proof.ran)),
        worker_succeeded=verdict.succeeded,
        cancelled=verdict.cancelled,
    )
    changes = {"candidate": candidate, "evidence": proof.evidence}
    if file.lease.state == "allocated":
        frozen = file.having(**changes)
    else:
        frozen = file.to("frozen", "freeze", **changes)
    for code, message in proof.diagnostics:
        frozen = frozen.noting(code, message, f"{prefix}/{MANIFEST}")
    for one in proof.ran:
        if not one.passed:
            frozen = frozen.noting("check_failed", f"check {one.check.name!r} {one.told}", one.log)
    return frozen

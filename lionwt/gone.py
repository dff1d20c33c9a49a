"""End a lease whose worktree is gone: save what can still be saved, and retire what remains.

Its commits may be all that is left of the work, and they are remembered by its
branch, by the registration (a detached HEAD, a reflog, an operation that was
never finished) and by the anchors of a freeze. All of these go with the lease,
so whatever no whole bundle of the evidence holds is bundled first. What a freeze
has recorded stays as it was frozen (ADR-0091 D5, design section 8).

Killed at any step it is done again: a bundle that was finished is found and not
made twice, and nothing is removed before the outcome is on disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from lionwt import (
    freeze,
    git,
    history,
    landing,
    names,
    processes,
    registration,
    repository,
    submodules,
    teardown,
    worktree,
)
from lionwt.errors import LionwtError
from lionwt.faults import point
from lionwt.records import Evidence, LeaseFile, Outcome
from lionwt.session import Run
from lionwt.store import make_own_dir, move_file, sync_dir


def end(run: Run, file: LeaseFile) -> LeaseFile:
    """Stop what is left of the worker, save the commits, then end the lease as failed."""
    if processes.workers(run.paths, file.worker_id):
        processes.stop(run.paths, file.worker_id, file.lease.worktree_path, processes.DEFAULT_STOP_AFTER)
    branch = names.HEADS + file.lease.branch_name
    common_dir = str(run.common_dir)
    anchors = repository.find_branches(common_dir, names.anchor_prefix(run.file.run_id, file.worker_id)).values()
    tip = repository.find_tip(common_dir, branch)
    known = [oid for oid in (tip, *(anchor.oid for anchor in anchors)) if oid is not None]
    with run.scratch(file.worker_id) as scratch:
        staged, lost = _staged(run, file, scratch)
        tips = _tips(run, file, [*known, *staged])
        ref = _save(run, file, scratch, tips)
    if known or _admin(file) is not None:
        file = file.noting("worktree_gone", f"{file.lease.worktree_path} had been removed by somebody else")
    else:
        file = file.noting("resources_gone", "worktree, registration and branch had been removed by somebody else")
    if ref is not None:
        what = "its commits and what was staged were saved" if staged else "the branch's commits were saved"
        file = file.noting("commits_saved", what, ref)
    if lost is not None:
        file = file.noting("staged_lost", f"what was staged could not be saved: {lost}")
    file = _save_submodules(run, file)
    point("gone.saved")
    if file.evidence is not None or tip is not None:
        proof = file.evidence or Evidence(
            tree="", commit=run.file.base_sha, head=None, branch_tip=tip, manifest_sha256=""
        )
        file = file.having(evidence=proof.having(branch_tip=tip))
    if (found := landing.find(run, file)) is not None:
        return teardown.finish(run, landing.landed(run, file, found, []))
    return teardown.finish(run, teardown.decide(run, file, failed(file)))


def failed(file: LeaseFile) -> Outcome:
    """The outcome of a lease that was interrupted, or lost its worktree after the freeze."""
    succeeded = file.candidate is not None and file.candidate.worker_succeeded
    what = "lost its worktree before it was completed" if succeeded else "was interrupted"
    return Outcome(
        status="discarded",
        policy=file.policy.completion,
        code="worker_failed",
        message=f"worker {file.worker_id!r} {what}; nothing was landed",
        hint="its patch, if any, is kept as evidence",
    )


def _admin(file: LeaseFile) -> Path | None:
    """The registration, where it is still the lease's."""
    identity = file.identity
    if identity is None or registration.read_nonce(Path(identity.admin_dir)) != identity.nonce:
        return None
    return Path(identity.admin_dir)


def _tips(run: Run, file: LeaseFile, found: list[str]) -> tuple[str, ...]:
    """Every commit that goes with the lease: ``found``, what its reflogs say, and what a freeze has recorded."""
    found += history.named_by_branch(str(run.common_dir), names.HEADS + file.lease.branch_name)
    if file.identity is not None and _admin(file) is not None:
        found += history.read(run.file, run.paths.git_dir, file, file.identity).tips
    if file.evidence is not None:
        found += [oid for oid in (file.evidence.head, file.evidence.branch_tip) if oid is not None]
    return tuple(oid for oid in dict.fromkeys(found) if oid != run.file.base_sha and oid.strip("0"))


#: Where the stages of an index with unmerged entries go in the tree that keeps them.
_STAGES: Final = {b"0": b"merged", b"1": b"base", b"2": b"ours", b"3": b"theirs"}


def _staged(run: Run, file: LeaseFile, scratch: Path) -> tuple[list[str], str | None]:
    """What was staged and neither committed nor frozen, as a commit; the registration's index still holds it.

    Beside it why that cannot be had, where it cannot.
    """
    admin = _admin(file)
    if admin is None or file.evidence is not None or not (admin / "index").is_file():
        return [], None
    private = run.private().with_env(GIT_INDEX_FILE=scratch / "index")
    try:
        for half in (admin / "index", *admin.glob("sharedindex.*")):  # git looks for the other half beside it
            if half.is_file():
                worktree.copy_index(half, scratch / half.name)
        tree, what = _tree_of_index(private, scratch)
        head = git.shared(str(run.common_dir), git_dir=str(admin)).run(
            "rev-parse", "--quiet", "--verify", "HEAD^{commit}", ok=(0, 1, 128)
        )
        parent = git.text(head.out).strip() or run.file.base_sha
        if private.oid("rev-parse", "--verify", f"{parent}^{{tree}}") == tree:
            return [], None
        message = f"{file.worker_id}: what was staged when its worktree went{what}\n"
        return [run.commit_tree(tree, [parent], message, file.lease.created_at)], None  # however often it is made
    except LionwtError as error:  # not an index, or its objects are gone
        return [], error.message
    except OSError as error:
        return [], f"{admin / 'index'}: {error.strerror}"


def _tree_of_index(private: git.Git, scratch: Path) -> tuple[str, str]:
    """The tree of an index, and what there is to say of it: with unmerged entries, a directory for each stage."""
    rows = [row.partition(b"\t") for row in git.records(private.run("ls-files", "-s", "-z", timeout=git.CONTENT).out)]
    if all(entry.endswith(b" 0") for entry, _, _ in rows):
        return private.oid("write-tree", timeout=git.CONTENT), ""
    by_stage = private.with_env(GIT_INDEX_FILE=scratch / "stages")
    lines = [b"%s\t%s/%s\0" % (entry[:-2], _STAGES[entry[-1:]], name) for entry, _, name in rows]
    by_stage.run("update-index", "-z", "--add", "--index-info", stdin=b"".join(lines), timeout=git.CONTENT)
    return by_stage.oid("write-tree", timeout=git.CONTENT), ", unmerged: a directory for each side"


def _save_submodules(run: Run, file: LeaseFile) -> LeaseFile:
    """The repositories of its submodules lie in the registration, which is about to go."""
    admin = _admin(file)
    if admin is None or file.identity is None or not (admin / "modules").is_dir():
        return file
    target = run.paths.evidence(file.worker_id)
    make_own_dir(target)
    with run.scratch(file.worker_id) as scratch:
        saved = submodules.save_stores(run.file, run.paths, file, file.identity, scratch, target, "gone-")
    for bundle in saved:
        file = file.noting("commits_saved", "commits of a submodule were saved", bundle)
    sync_dir(target)
    return file


def _save(run: Run, file: LeaseFile, scratch: Path, tips: tuple[str, ...]) -> str | None:
    """Bundle ``tips`` unless a bundle of the evidence holds them; the bundle, where it is not the freeze's own."""
    tips = tuple(history.existing(run.private(), tips))
    if not tips:
        return None
    target = run.paths.evidence(file.worker_id)
    make_own_dir(target)
    free = None
    for name in (freeze.COMMITS, *(f"late-{number}.bundle" for number in range(1, 1000))):
        bundle = target / name
        if not os.path.lexists(bundle):
            free = free or bundle
            if name != freeze.COMMITS:
                break
        elif history.holds(run.file, run.paths.git_dir, scratch, bundle, tips):
            return None if file.evidence is not None and name == freeze.COMMITS else run.paths.ref(bundle)
    assert free is not None
    made = scratch / "gone.bundle"
    if not history.save_commits(run.file, run.paths.git_dir, scratch / "git", tips, made):
        return None
    move_file(made, free)
    sync_dir(target)
    sync_dir(target.parent)
    return run.paths.ref(free)

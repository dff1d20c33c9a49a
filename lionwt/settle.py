"""Settle landings that a dead coordinator began: finish them forward, or declare them.

The journal decides together with the ref: whatever killed the coordinator, the
target is the old head or the journalled merge (design section 8). A landing is
never done twice and never undone.
"""

from __future__ import annotations

from lionwt import evidence, forward, git, indexlock, landing, teardown, words
from lionwt.checkout import Checkout
from lionwt.errors import LionwtError
from lionwt.faults import point
from lionwt.indexlock import IndexLock
from lionwt.records import Landing, LeaseFile, Outcome
from lionwt.session import Run


def unresolved_landings(run: Run, held_worker: str, lock_fd: int, wait: float) -> None:
    """Settle every landing of the run that was intended and not recorded; ``wait`` seconds for another's lease.

    Call under the promotion lock and the lease lock of ``held_worker``: nobody
    else can be landing, so an intent that stands there was left by the dead.
    """
    files, _ = run.store.leases(run.file)
    for file in files:
        if file.intent is None or file.intent.kind != "promote":
            continue
        if file.worker_id == held_worker:
            one_landing(run, file, lock_fd)
        else:
            with run.locked(file.worker_id, wait) as now:
                if now.intent is not None and now.intent.kind == "promote":
                    one_landing(run, now, lock_fd)
    indexlock.drop_abandoned(Checkout(run))


def one_landing(run: Run, file: LeaseFile, lock_fd: int) -> LeaseFile:
    """Settle one intended landing; returns the lease as it stands then."""
    assert file.intent is not None and file.intent.landing is not None
    intended = file.intent.landing
    head = landing.target_head(run)
    if head is not None and _descends(run, head, intended.merge):
        left = _bring_forward(run, file, intended, head, lock_fd)
        return landing.landed(run, file, intended, left, _reverted(run, intended, head))
    if head == intended.expected and _never_moved(run, file.worker_id, intended):
        _drop_lock(run, intended)
        return run.store.write(file.having(intent=None))
    file = _put_back(run, file, intended, head)
    _drop_lock(run, intended)
    error = landing.moved(run, intended.expected, undone=intended.merge)
    outcome = Outcome(
        status="needs_resolution", policy="merge_validated", code=error.code, message=error.message, hint=error.hint
    )
    return teardown.decide(run, file.noting("landed_then_moved", error.message), outcome)


def _put_back(run: Run, file: LeaseFile, intended: Landing, head: str | None) -> LeaseFile:
    """Put back what a landing that is not finished had moved aside, and note what cannot be."""
    checkout = Checkout(run)
    kept = forward.put_back(checkout, intended.expected, intended.merge, head if checkout.is_on_target() else None)
    return file.noting("checkout_behind", f"files of yours are in {words.some(kept)}") if kept else file


def _descends(run: Run, head: str, merge: str) -> bool:
    if head == merge:
        return True
    private = run.private()
    if private.run("cat-file", "-e", f"{merge}^{{commit}}", ok=(0, 1, 128)).code:
        return False
    answer = private.run("merge-base", "--is-ancestor", merge, head, ok=(0, 1, 128))
    if answer.code == 128:
        raise git.failure(["merge-base"], answer)
    return answer.code == 0


def _never_moved(run: Run, worker_id: str, intended: Landing) -> bool:
    """Whether it is certain that the target has never held the merge.

    The sign was set before the move; the target's reflog must agree. The move
    makes a reflog, so where there was none before and there is none now, it says
    so too; one that has gone or cannot be read proves nothing.
    """
    if landing.may_have_landed(run, worker_id, intended.merge):
        return False
    if not landing.has_reflog(run):
        return intended.logged is False
    logged = git.shared(str(run.common_dir)).run("reflog", "show", "--format=%H", run.file.target, "--", ok=(0, 128))
    return logged.code == 0 and intended.merge not in git.text(logged.out).split()


def _bring_forward(run: Run, file: LeaseFile, intended: Landing, head: str, lock_fd: int) -> list[str]:
    """Finish the checkout's update, on that merge's paths only."""
    checkout = Checkout(run)
    if not checkout.is_on_target():
        # The operator has gone elsewhere; git brought that checkout there.
        kept = forward.put_back(checkout, intended.expected, intended.merge, None)
        kept += forward.written(checkout, intended.expected, intended.merge)
        _drop_lock(run, intended)
        return kept
    lock = _adopt_lock(checkout, intended, file)
    try:
        left = forward.repair(checkout, lock, intended.expected, intended.merge, lock_fd, head)
        point("promote.updated")
        lock.install()
    except (LionwtError, OSError) as error:
        # The lock stays: git must refuse until it is finished.
        raise landing.unfinished(run, intended.merge, error) from error
    return left


def _reverted(run: Run, intended: Landing, head: str) -> list[str]:
    """The paths of a landing that hold at ``head`` again what they held before it."""
    if head == intended.merge:
        return []
    objects = run.private()
    landed = {change.path: change for change in evidence.changes_between(objects, intended.expected, intended.merge)}
    since = evidence.changes_between(objects, intended.merge, head)
    return [git.text(c.path) for c in since if c.path in landed and c.new == landed[c.path].old]


def _adopt_lock(checkout: Checkout, intended: Landing, file: LeaseFile) -> IndexLock:
    """The index lock that the dead coordinator left, or a new one where it left none."""
    lock = indexlock.left_behind(checkout, intended.index_lock, intended.scratch)
    lock.empty()
    if not lock.is_held():
        return indexlock.take(checkout, file.lease.state_path)
    lock.fill()
    return lock


def _drop_lock(run: Run, intended: Landing) -> None:
    """Remove the index lock of a landing that did not happen, if it is still that one."""
    indexlock.left_behind(Checkout(run), intended.index_lock, intended.scratch).give_back()

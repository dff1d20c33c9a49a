"""Merge a candidate in memory and move the target to it.

The merge is computed in the object database: no checkout is needed for it, and
a conflict touches nothing. The move is one compare-and-swap of the ref, and
that is the commit point; before it everything can be dropped, after it
everything must be finished forward (design section 7, promote 3 to 6).

The same ref transaction sets a sign, ``refs/lionwt/<run>/<worker>/landed``,
which stays until the lease has ended. git renames the refs of a transaction in
the order in which they are named, so the sign is there before the target moves:
where it is missing the target has never held the merge, whatever became of the
target and its reflog since. A sign alone proves nothing, and then nothing is
landed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from lionwt import forward, git, indexlock, names, obstacles, repository, store, words
from lionwt.checkout import Checkout
from lionwt.errors import LionwtError, as_told
from lionwt.faults import point
from lionwt.indexlock import IndexLock
from lionwt.records import Intent, Landing, LeaseFile, Outcome
from lionwt.session import Run
from lionwt.signals import held_back
from lionwt.values import Value

CONFLICT = "conflict.json"


class Conflict(Value, frozen=True):
    """Where a candidate does not merge; ``ref`` names the evidence."""

    paths: tuple[str, ...]
    ref: str


def merge(run: Run, file: LeaseFile, expected: str, candidate: str) -> tuple[str, Conflict | None]:
    """The tree of ``expected`` and ``candidate`` merged, or the conflict, written down as evidence."""
    with run.scratch(".merge") as scratch:
        _gather_attributes(run, expected, scratch / "tree")
        private = git.private(run.paths.git_dir, run.common_dir, work_tree=scratch / "tree", index=scratch / "index")
        result = private.run(
            "merge-tree", "--write-tree", "-z", "--messages", expected, candidate, ok=(0, 1), timeout=git.CONTENT
        )
    fields = result.out.split(b"\0")
    tree = git.text(fields[0])
    if not git.is_oid(tree):  # exit 1 with nothing on stdout is no conflict
        raise git.failure(["merge-tree"], result)
    if result.code == 0:
        return tree, None
    end = fields.index(b"", 1)
    stages = [field.partition(b"\t") for field in fields[1:end]]
    paths = tuple(dict.fromkeys(git.text(name) for _, _, name in stages))
    where = run.paths.evidence(file.worker_id) / CONFLICT
    store.make_own_dir(where.parent)
    details: dict[str, Any] = {
        "schema": "lionwt/conflict@1",
        "expected": expected,
        "candidate": candidate,
        "base": run.file.base_sha,
        "paths": list(paths),
        "stages": [{"path": git.text(name), "entry": git.text(meta)} for meta, _, name in stages],
        "messages": _messages(fields[end + 1 :]),
    }
    store.replace_json(where, details)
    return tree, Conflict(paths, run.paths.ref(where))


def _messages(fields: list[bytes]) -> list[str]:
    """The messages of merge-tree: count, that many paths, kind, text; repeated."""
    found = []
    position = 0
    while position < len(fields) and fields[position].isdigit():
        position += int(fields[position]) + 1
        found += [git.text(text).strip() for text in fields[position + 1 : position + 2]]
        position += 2
    return found


def _gather_attributes(run: Run, commit: str, where: os.PathLike[str]) -> None:
    """Put the commit's ``.gitattributes`` where merge-tree looks for them, so ``merge=union`` holds."""
    private = run.private()
    os.mkdir(where)
    listed = private.run("ls-tree", "-r", "-z", "--full-tree", commit, timeout=git.CONTENT).out
    for row in git.records(listed):
        meta, _, name = row.partition(b"\t")
        mode, _, oid = meta.decode("ascii").split(" ")
        if name.rpartition(b"/")[2] != b".gitattributes" or not mode.startswith("100"):
            continue
        path = os.path.join(os.fsencode(where), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as out:
            private.run("cat-file", "blob", oid, stdout=out)


def land(run: Run, file: LeaseFile, expected: str, tree: str, lock_fd: int) -> LeaseFile:
    """Move the target from ``expected`` to the merge and bring the checkout forward.

    Call under the promotion lock, whose descriptor ``lock_fd`` the children that
    move and update inherit. Returns the file with the decided outcome. Raises
    ``checkout_blocked`` with everything as it was, ``target_moved``.
    """
    assert file.evidence is not None
    checkout = Checkout(run)
    checkout.require_on_target()
    candidate = file.evidence.commit
    commit = run.commit_tree(tree, [expected, candidate], _message(run, file))
    lock = indexlock.take(checkout, file.lease.state_path)
    has_moved = False
    try:
        point("promote.index_locked")
        if target_head(run) != expected:  # a commit that was being made while the lock was waited for
            raise moved(run, expected)
        look = obstacles.require_clear(checkout, lock, expected, commit)
        landing = Landing(
            expected=expected,
            merge=commit,
            candidate=candidate,
            tree=tree,
            index_lock=lock.inode,
            scratch=lock.copy.name,
            logged=has_reflog(run),
        )
        lease = file.lease.having(expected_target_sha=expected)
        intent = Intent(kind="promote", at=time.time(), nonce=os.urandom(8).hex(), landing=landing)
        journalled = run.store.write(file.having(lease=lease, intent=intent))
        point("promote.intended")
        with held_back():
            _move(run, file.worker_id, expected, commit, lock_fd)
            has_moved = True
            try:
                point("promote.moved")
                left = forward.forward(checkout, lock, look, lock_fd)
                point("promote.updated")
                lock.install()
                point("promote.index_renamed")
                return landed(run, journalled, landing, left)
            except (LionwtError, OSError) as error:
                raise unfinished(run, commit, error) from error
    except BaseException:
        if not has_moved:
            _take_back(run, file, lock)
        raise


def _take_back(run: Run, before: LeaseFile, lock: IndexLock) -> None:
    """Undo a landing whose target has not moved: the intent first, for the lock says whose it is.

    Where a look cannot tell, everything stays as it is, for reconcile.
    """
    with held_back():
        now = run.lease(before.worker_id)
        if now.intent is not None and now.intent.landing is not None:
            intended = now.intent.landing
            if target_head(run) == intended.merge or not _drop_sign(run, before.worker_id, intended.merge):
                return
            run.store.write(before.having(serial=now.serial))
        lock.give_back()


def unfinished(run: Run, commit: str, error: LionwtError | OSError) -> LionwtError:
    """The error of a landing that is past its commit point and has to be finished forward."""
    root = run.file.checkout.path
    error = as_told(error, f"updating {root}")
    return LionwtError(
        error.code,
        f"{names.short_branch(run.file.target)!r} was moved to {commit}, but {root} could not be brought there: "
        f"{error.message}; git refuses to work there until it is",
        hint=error.hint or "mend what is named, then run the same command again: it finishes the landing",
        diagnostics=error.diagnostics,
    )


def landed(run: Run, file: LeaseFile, landing: Landing, left: Sequence[str], reverted: Sequence[str] = ()) -> LeaseFile:
    """Make a landing's outcome durable, with the paths ``left`` as found and those ``reverted`` since."""
    code = message = hint = None
    if reverted:
        code = "landed_then_reverted"
        short = names.short_branch(run.file.target)
        message = f"landed as {landing.merge}, but {short!r} holds again what was before in {words.some(reverted)}"
        look = words.command("git", "-C", run.file.checkout.path, "log", f"{landing.merge}..{short}")
        hint = f"see what took it back: {look}"
        file = file.noting(code, message)
    if left:
        code = "checkout_behind"
        kept = words.count(len(left), "file of the checkout holds", "files of the checkout hold")
        message = f"landed, but {kept} something else and stayed as found: {words.some(left)}"
        hint = f"look at them: {words.command('git', '-C', run.file.checkout.path, 'status')}"
        file = file.noting(code, message)
    outcome = Outcome(
        status="promoted", policy="merge_validated", landing=landing, code=code, message=message, hint=hint
    )
    written = run.store.write(file.having(outcome=outcome, intent=Intent(kind="teardown", at=time.time())))
    point("promote.landed")
    return written


def _move(run: Run, worker_id: str, expected: str, commit: str, lock_fd: int) -> None:
    """Compare-and-swap the target, after its sign. What became of it is decided by a look, not by words."""
    git_ = Checkout(run).shared().keeping(lock_fd)
    # The reflog tells a person what happened, whatever the configuration says.
    words = ("update-ref", "--no-deref", "--create-reflog", "-m", f"lionwt promote {run.argument}", "--stdin", "-z")
    sign, target = os.fsencode(sign_of(run, worker_id)), os.fsencode(run.file.target)
    new, old = commit.encode("ascii"), expected.encode("ascii")
    commands = b"update %s\0%s\0\0update %s\0%s\0%s\0" % (sign, new, target, new, old)
    try:
        git_.run(*words, stdin=commands)
    except LionwtError as error:
        now = target_head(run)
        if now == commit:
            return
        if now != expected:
            raise moved(run, expected) from error
        raise LionwtError(
            error.code,
            f"{names.short_branch(run.file.target)!r} could not be moved; nothing was landed and the checkout "
            f"is as it was: {error.message}",
            hint=error.hint or "clear what git names, then promote again",
        ) from error


def find(run: Run, file: LeaseFile) -> Landing | None:
    """The landing of a frozen candidate that the target holds and its file does not know of.

    A file that was restored from a backup is older than what became of it.
    """
    head = target_head(run)
    if file.evidence is None or file.candidate is None or head is None:
        return None
    listed = run.private().run("rev-list", "--merges", "--parents", head, f"^{run.file.base_sha}", ok=(0, 128))
    for line in git.text(listed.out).splitlines():
        merge, *parents = line.split(" ")
        if parents[1:] == [file.evidence.commit] and _is_lionwts(run, file, merge):
            tree = run.private().oid("rev-parse", "--verify", f"{merge}^{{tree}}")
            return Landing(
                expected=parents[0], merge=merge, candidate=parents[1], tree=tree, index_lock=None, scratch=None
            )
    return None


def _is_lionwts(run: Run, file: LeaseFile, merge: str) -> bool:
    """Whether a merge says of itself what lionwt's says: a person may have merged the candidate by hand."""
    said = git.text(run.private().run("cat-file", "commit", merge).out).partition("\n\n")[2]
    return said == _message(run, file)


def sign_of(run: Run, worker_id: str) -> str:
    """The ref that holds the merge from before the target's move until the lease has ended."""
    return f"{names.anchor_prefix(run.file.run_id, worker_id)}landed"


def may_have_landed(run: Run, worker_id: str, merge: str) -> bool:
    """Whether the sign of that landing stands; False proves that the target has never held the merge."""
    sign = sign_of(run, worker_id)
    found = repository.find_branches(str(run.common_dir), sign).get(sign)
    return found is not None and found.oid == merge


def _drop_sign(run: Run, worker_id: str, merge: str) -> bool:
    """Remove the sign of a landing that did not happen; False where it stays."""
    if may_have_landed(run, worker_id, merge):
        sign = os.fsencode(sign_of(run, worker_id))
        git.update_refs(git.shared(str(run.common_dir)), [b"delete %s\0%s\0" % (sign, merge.encode("ascii"))])
    return not may_have_landed(run, worker_id, merge)


def has_reflog(run: Run) -> bool:
    """Whether the target has a reflog."""
    return git.shared(str(run.common_dir)).run("reflog", "exists", run.file.target, ok=(0, 1)).code == 0


def target_head(run: Run) -> str | None:
    """The commit the target stands at; None when it is gone or has become a symref."""
    found = repository.find_branches(str(run.common_dir), run.file.target).get(run.file.target)
    return found.oid if found is not None and not found.symref else None


def moved(run: Run, expected: str, undone: str | None = None) -> LionwtError:
    """The error of a target that is not where this run left it; ``undone`` is a merge that it may have held since."""
    found = repository.find_branches(str(run.common_dir), run.file.target).get(run.file.target)
    now = "gone" if found is None else f"at {found.oid}"
    if found is not None and found.symref:
        now = f"a symbolic ref to {found.symref} now"
    short = names.short_branch(run.file.target)
    what = f"{short!r} is {now}, but this run left it at {expected}; nothing was landed"
    if undone is not None:
        what = (
            f"{short!r} is {now}, without the merge {undone} that an interrupted landing had made: "
            "whether somebody took it back cannot be ruled out, so it was not landed again"
        )
    return LionwtError(
        "target_moved",
        what,
        hint="its patch is kept: apply it yourself, or open another run, which starts from where the branch is now",
        diagnostics={"expected": expected, "found": found.oid if found is not None else None},
    )


def _message(run: Run, file: LeaseFile) -> str:
    assert file.candidate is not None
    return (
        f"Merge worker {file.worker_id} of run {run.file.run_id}\n\n"
        f"Lionwt-Run: {run.file.run_id}\n"
        f"Lionwt-Worker: {file.worker_id}\n"
        f"Lionwt-Patch-SHA256: {file.candidate.patch_sha256}\n"
    )

"""What is in the way of a landing in the operator's checkout.

Asked under the checkout's index lock and before the target moves: git's own
answer first, then what git would not mind to destroy. Where something is in the
way nothing is changed (design section 7, promote 5).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from lionwt import evidence, git, versions, words
from lionwt.aside import Noted, note
from lionwt.checkout import Checkout, blocked
from lionwt.errors import LionwtError
from lionwt.evidence import Change
from lionwt.indexlock import IndexLock
from lionwt.listing import GITLINK, LIST, Listing
from lionwt.paths import files_below, first_existing, is_free
from lionwt.values import Value

#: So many paths in the way are named.
_SHOWN: Final = 10


class Look(Value, frozen=True):
    """A checkout in which nothing is in the way: the changes to come, and what stands at their paths."""

    merge: str
    changes: list[Change]
    noted: Noted


def require_clear(checkout: Checkout, lock: IndexLock, expected: str, merge: str) -> Look:
    """Raise ``checkout_blocked`` when an operator's file is in the way of the merge."""
    changes = evidence.changes_between(checkout.run.private(), expected, merge)
    noted = note(os.fsencode(checkout.root), [change.path for change in changes])  # before git looks
    private = checkout.private(lock.copy)
    try:
        private = _as_sparse_as_it_is(checkout, private)
        private.run(
            "update-index", "-q", "--ignore-submodules", "--refresh", ok=(0, 1), timeout=git.CONTENT
        )  # 1: something differs
    except LionwtError:
        _require_readable(checkout, lock, private)
        raise
    tried = private.run("read-tree", "-n", "-m", "-u", expected, merge, ok=(0, 1, 128), timeout=git.CONTENT)
    in_way = {}
    hidden = _Hidden((), ())
    if tried.code:
        listing = Listing(private.run(*LIST, timeout=git.CONTENT).out, checkout.run.file.object_format)
        _refuse_unmerged(checkout, listing)
        in_way = dict.fromkeys(_uncommitted(private, expected, changes), "not committed")
        hidden = _hidden_edits(checkout, listing, [change for change in changes if change.path not in in_way])
        in_way.update(dict.fromkeys((*hidden.assumed, *hidden.skipped), "edited, but git was told not to look"))
    for path in _removed(checkout, private, [change.path for change in changes if change.status in "MT"]):
        in_way[path] = "removed, not committed"
    for change in changes:  # git does not look at what has taken a submodule's place
        if change.old.mode == GITLINK and not is_free(os.fsencode(checkout.root), change.path):
            in_way[change.path] = "not committed"
    for path in _hidden_obstacles(checkout, private, changes):
        in_way.setdefault(path, "not tracked")
    if in_way:
        raise _in_the_way(checkout, in_way, hidden)
    if tried.code:
        said = git.text(tried.err).strip().replace("error: ", "").splitlines()
        raise blocked(
            f"files of yours in {checkout.root} are in the way: {words.some(said, 6, '; ')}",
            "commit them, stash them or move them away, then promote again",
        )
    return Look(merge, changes, noted)


class _Hidden(NamedTuple):
    """Edited paths that git was told not to look at, by what tells it so; one may be in both."""

    assumed: Sequence[bytes]
    skipped: Sequence[bytes]


def _hidden_edits(checkout: Checkout, listing: Listing, changes: Sequence[Change]) -> _Hidden:
    flagged = [change for change in changes if change.path in listing.flagged]
    there = [change for change in flagged if os.path.lexists(checkout.absolute(change.path))]
    if not there:
        return _Hidden((), ())
    with checkout.run.scratch(".look") as scratch:
        same = versions.matching(checkout, scratch, [(change.path, change.old) for change in there], checkout.root)
    edited = [change.path for change in there if change.path not in same]
    return _Hidden(
        [path for path in edited if path in listing.assumed], [path for path in edited if path in listing.skipped]
    )


def _require_readable(checkout: Checkout, lock: IndexLock, private: git.Git) -> None:
    """Raise ``checkout_blocked`` where git cannot read the operator's index, of which the lock has a copy."""
    look = private.run("ls-files", "-z", ok=(0, 128), timeout=git.CONTENT)
    if look.code:
        said = git.text(look.err).strip().replace(str(lock.copy), str(lock.index))
        aside = words.command("mv", lock.index, f"{lock.index}.broken")
        raise blocked(
            f"{lock.index} cannot be read ({said})",
            "restore it, or make it anew, which forgets what was staged in it and leaves every file: "
            f"{aside} && {words.command('git', '-C', checkout.root, 'reset', '-q')}",
        )


def _refuse_unmerged(checkout: Checkout, listing: Listing) -> None:
    """Raise ``checkout_blocked`` for conflicts in the index, which are there without any merge after a stash pop."""
    if not listing.unmerged:
        return
    shown = words.some([repr(git.text(path)) for path in listing.unmerged], _SHOWN)
    paths = [git.text(path) for path in listing.unmerged]
    back = words.command("git", "-C", checkout.root, "restore", "--staged", "--worktree", "--", *paths)
    status = words.command("git", "-C", checkout.root, "status")
    count = words.count(len(listing.unmerged), "conflict is", "conflicts are")
    raise blocked(
        f"{count} not resolved in {checkout.root}: {shown}",
        "resolve what is named, git add it and promote again; or go back there to what is committed "
        f"({back}); what is open says: {status}",
    )


def _in_the_way(checkout: Checkout, in_way: Mapping[bytes, str], hidden: _Hidden) -> LionwtError:
    """The error that names what is in the way, and how it is put aside."""
    shown = [f"{git.text(path)!r} ({why})" for path, why in sorted(in_way.items())]
    count = words.count(len(in_way), "file of yours is", "files of yours are")
    if any(hidden):
        undone = [
            words.command("git", "-C", checkout.root, "update-index", f"--no-{flag}", "--", *map(git.text, paths))
            for flag, paths in zip(("assume-unchanged", "skip-worktree"), hidden, strict=True)
            if paths
        ]
        hint = f"let git see what it was told not to look at, then promote again: {' && '.join(undone)}"
    elif "not tracked" in in_way.values() or len(in_way) > _SHOWN:
        hint = "commit, stash (git stash push --all) or move away what is named, then promote again"
    else:
        paths = [git.text(path) for path in sorted(in_way)]
        aside = words.command("git", "-C", checkout.root, "stash", "push", "--", *paths)
        hint = f"commit what is named, or put it aside: {aside}"
    return blocked(f"{count} in the way in {checkout.root}: {words.some(shown, _SHOWN)}", hint)


def _uncommitted(private: git.Git, expected: str, changes: Sequence[Change]) -> list[bytes]:
    """The paths of a landing that differ from what is committed: in the index, or in the file."""
    differing: set[bytes] = set()
    for command in (
        ("diff-index", "-z", "--cached", "--name-only", "--no-renames", expected, "--"),
        ("diff-files", "-z", "--name-only", "--"),
    ):
        differing.update(git.records(private.run(*command, timeout=git.CONTENT).out))
    return [change.path for change in changes if change.path in differing]


def _as_sparse_as_it_is(checkout: Checkout, private: git.Git) -> git.Git:
    """The same, under the operator's own sparse definition: what is left out there stays left out."""
    definition = checkout.sparse_definition(private)
    if definition is None:
        return private
    shutil.copyfile(definition, checkout.run.paths.git_dir / "info" / "sparse-checkout")
    cone = checkout.setting("core.sparseCheckoutCone") or "true"
    return private.with_flags("-c", "core.sparseCheckout=true", "-c", f"core.sparseCheckoutCone={cone}")


def _removed(checkout: Checkout, private: git.Git, paths: Sequence[bytes]) -> list[bytes]:
    """The tracked ``paths`` that the operator removed; what sparse leaves out is not removed."""
    missing = [path for path in paths if not os.path.lexists(checkout.absolute(path))]
    if not missing:
        return []
    listed = git.records(private.run("ls-files", "-z", "-t", timeout=git.CONTENT).out)
    skipped = {row[2:] for row in listed if row.startswith(b"S ")}
    return [path for path in missing if path not in skipped]


def _hidden_obstacles(checkout: Checkout, private: git.Git, changes: Sequence[Change]) -> list[bytes]:
    """What an added path would destroy, ignored and newly staged files among it, which git does not mind."""
    root = os.fsencode(checkout.root)
    added = [change.path for change in changes if change.status in "AT"]
    removed = {change.path for change in changes if change.status in "DT"}
    suspects = [path for path in added if first_existing(root, path) is not None]
    if not suspects:
        return []
    listed = private.run("ls-files", "-z", timeout=git.CONTENT).out
    tracked = set(git.records(listed))
    obstacles: dict[bytes, None] = {}
    for path in suspects:
        found = first_existing(root, path)
        if found is None or found in tracked:
            continue
        if not os.path.isdir(os.path.join(root, found)) or os.path.islink(os.path.join(root, found)):
            obstacles[found] = None
            continue
        inside = (os.path.join(found, name) for name in files_below(os.path.join(root, found)))
        obstacles.update((inner, None) for inner in inside if inner not in tracked or inner not in removed)
    return list(obstacles)

"""What is in the way of a landing in the operator's checkout.

Asked under the checkout's index lock and before the target moves: git's own
answer first, then what git would not mind to destroy. Where something is in the
way nothing is changed (design section 7, promote 5).
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Final

from lionwt import evidence, git, words
from lionwt.aside import Noted, note
from lionwt.checkout import Checkout, blocked
from lionwt.errors import LionwtError
from lionwt.evidence import Change
from lionwt.indexlock import IndexLock
from lionwt.listing import GITLINK
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
    private = _as_sparse_as_it_is(checkout, checkout.private(lock.copy))
    private.run(
        "update-index", "-q", "--ignore-submodules", "--refresh", ok=(0, 1), timeout=git.CONTENT
    )  # 1: something differs
    tried = private.run("read-tree", "-n", "-m", "-u", expected, merge, ok=(0, 1, 128), timeout=git.CONTENT)
    in_way = {path: "not committed" for path in _uncommitted(private, expected, changes) if tried.code}
    for path in _removed(checkout, private, [change.path for change in changes if change.status in "MT"]):
        in_way[path] = "removed, not committed"
    for change in changes:  # git does not look at what has taken a submodule's place
        if change.old.mode == GITLINK and not is_free(os.fsencode(checkout.root), change.path):
            in_way[change.path] = "not committed"
    for path in _hidden_obstacles(checkout, private, changes):
        in_way.setdefault(path, "not tracked")
    if in_way:
        raise _in_the_way(checkout, in_way)
    if tried.code:
        said = git.text(tried.err).strip().replace("error: ", "").splitlines()
        raise blocked(
            f"files of yours in {checkout.root} are in the way: {words.some(said, 6, '; ')}",
            "commit them, stash them or move them away, then promote again",
        )
    return Look(merge, changes, noted)


def _in_the_way(checkout: Checkout, in_way: Mapping[bytes, str]) -> LionwtError:
    """The error that names what is in the way, and how it is put aside."""
    shown = [f"{git.text(path)!r} ({why})" for path, why in sorted(in_way.items())]
    count = words.count(len(in_way), "file of yours is", "files of yours are")
    paths = " ".join(shlex.quote(git.text(path)) for path in sorted(in_way))
    if "not tracked" in in_way.values() or len(in_way) > _SHOWN:
        hint = "commit, stash (git stash push --all) or move away what is named, then promote again"
    else:
        hint = f"commit what is named, or put it aside: git -C {checkout.root} stash push -- {paths}"
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

"""Bring the operator's checkout over one merge: its index copy first, then its files.

Only the paths of that merge are touched, and of those only the ones that still
hold the version before it, the version after it, or a torn prefix of that one.
Everything else is the operator's and stays, whenever they wrote it: no file is
written over (:mod:`lionwt.aside`). The same writing serves a landing and the
repair of one that died (design section 7, promote 6, and section 8).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lionwt import evidence, git, versions
from lionwt.aside import Aside, Noted, note
from lionwt.checkout import Checkout
from lionwt.evidence import Change
from lionwt.faults import point
from lionwt.indexlock import IndexLock
from lionwt.listing import GITLINK, Entry
from lionwt.obstacles import Look
from lionwt.paths import beyond_link, drop_empty_dirs, file_above, is_free, parents, remove_empty

#: How git says that a file has come to where it was to make one.
_APPEARED: Final = (b"already exists, no checkout", b": File exists", b"is a directory")


def forward(checkout: Checkout, lock: IndexLock, look: Look, keep_fd: int) -> list[str]:
    """Bring tree and index copy over ``look.changes``; returns paths left as they are.

    What is no longer as the look found it is the operator's, and stays. Where
    lionwt was killed, a child goes on to its end under the promotion lock that
    ``reconcile`` waits for.
    """
    private = checkout.private(lock.copy).keeping(keep_fd)
    held = _index_entries(private)
    return _write(checkout, _aside(checkout, look.merge), private, look.changes, look.changes, look.noted, held, [])


def repair(
    checkout: Checkout, lock: IndexLock, expected: str, merge: str, keep_fd: int, head: str | None = None
) -> list[str]:
    """Bring the paths of one merge forward, one by one; returns those left as they are.

    Only paths where ``head`` (the merge itself, if not given) still holds the
    merge's version, and of these only files that hold the old version, the
    new one, or a torn prefix of the new one.
    """
    objects = checkout.run.private()
    changes = evidence.changes_between(objects, expected, merge)
    every = changes
    if head is not None and head != merge:
        moved_on = {change.path for change in evidence.changes_between(objects, merge, head)}
        changes = [change for change in changes if change.path not in moved_on]
    private = checkout.private(lock.copy).keeping(keep_fd)
    held = _index_entries(private)
    aside = _aside(checkout, merge)
    kept = _give_back(checkout, aside, expected, every, changes)
    noted = note(os.fsencode(checkout.root), [change.path for change in changes])
    writable, left = _sort_out(checkout, changes, held)
    left += kept
    return _write(checkout, aside, private, changes, writable, noted, held, left)


def _write(
    checkout: Checkout,
    aside: Aside,
    private: git.Git,
    changes: Sequence[Change],
    writable: Sequence[Change],
    noted: Noted,
    held: dict[bytes, tuple[Entry, bool]],
    left: list[bytes],
) -> list[str]:
    """Bring the index copy over ``changes``, and the files of those that are ``writable``."""
    definition = checkout.sparse_definition(private)  # asked while the index still says what is left out
    lines = []
    for change in changes:
        entry, _ = held.get(change.path, (None, False))
        if entry is None or entry in (change.old, change.new):
            lines.append(_index_line(change))
    lines.sort(key=lambda line: not line.startswith(b"0 "))  # removals first: a directory may become a file
    private.run("update-index", "-z", "--index-info", stdin=b"".join(lines), timeout=git.CONTENT)
    point("promote.index_updated")
    skips = {change.path for change in changes if held.get(change.path, (None, False))[1]}
    skips |= _left_out(private, definition, [change.path for change in changes if change.path not in held])
    skips = {change.path for change in changes if change.path in skips and change.status != "D"}
    absent = {path for path in skips if not os.path.lexists(checkout.absolute(path))}
    _write_files(checkout, aside, private, [change for change in writable if change.path not in absent], noted, left)
    if skips:
        private.run(
            "update-index", "-z", "--skip-worktree", "--stdin", stdin=b"".join(p + b"\0" for p in sorted(skips))
        )
    return sorted({git.text(path) for path in left})


def _aside(checkout: Checkout, merge: str) -> Aside:
    """Where a landing moves files to: known from its journal, whoever goes on with it."""
    place = checkout.git_dir / f"lionwt-{merge}.aside"
    if os.stat(checkout.git_dir).st_dev != os.stat(checkout.root).st_dev:
        place = checkout.root / f".lionwt-{merge}.aside"
    return Aside(os.fsencode(checkout.root), os.fsencode(place))


def put_back(checkout: Checkout, expected: str, merge: str, head: str | None) -> list[str]:
    """Put back what a landing moved aside that is not finished; returns what has to stay where it is.

    ``head`` is what the checkout is on, where that is known: what is as before
    the landing there belongs there.
    """
    if not os.path.isdir(_aside(checkout, merge).place):
        return []
    objects = checkout.run.private()
    changes = evidence.changes_between(objects, expected, merge)
    handled: list[Change] = []
    if head is not None:
        other = {change.path for change in evidence.changes_between(objects, expected, head)}
        handled = [change for change in changes if change.path not in other]
    return [git.text(place) for place in _give_back(checkout, _aside(checkout, merge), expected, changes, handled)]


def written(checkout: Checkout, expected: str, merge: str) -> list[str]:
    """What a landing wrote into a checkout that is on another branch by now, and that is not that branch's."""
    objects = checkout.run.private()
    changes = evidence.changes_between(objects, expected, merge)
    if (head := checkout.head()) is not None:
        elsewhere = {change.path for change in evidence.changes_between(objects, merge, head)}
        changes = [change for change in changes if change.path in elsewhere]
    with checkout.run.scratch(".repair") as scratch:
        return sorted(git.text(path) for path in versions.landed(checkout, scratch, changes))


def _give_back(
    checkout: Checkout, aside: Aside, expected: str, changes: Sequence[Change], handled: Sequence[Change]
) -> list[bytes]:
    with checkout.run.scratch(".repair") as scratch:
        return aside.give_back(
            {change.path for change in handled},
            lambda place: versions.matching(
                checkout, scratch, [(change.path, change.old) for change in changes], Path(git.text(place)), expected
            ),
            lambda taken: versions.landed(checkout, scratch, [change for change in handled if change.path in taken]),
        )


def _left_out(private: git.Git, definition: Path | None, new: Sequence[bytes]) -> set[bytes]:
    """The paths among ``new`` entries of the index that the operator's sparse ``definition`` leaves out."""
    if definition is None or not new:
        return set()
    # What the definition takes in is what it would exclude, read as an exclude file.
    listed = private.run("ls-files", "-z", "-c", "-i", f"--exclude-from={definition}", timeout=git.CONTENT)
    return set(new).difference(git.records(listed.out))


def _sort_out(
    checkout: Checkout, changes: Sequence[Change], held: dict[bytes, tuple[Entry, bool]]
) -> tuple[list[Change], list[bytes]]:
    """The changes whose file may be written, and the paths that hold something of the operator's."""
    with checkout.run.scratch(".repair") as scratch:
        as_old = versions.matching(checkout, scratch, [(change.path, change.old) for change in changes], checkout.root)
        landed = versions.landed(checkout, scratch, [change for change in changes if change.path not in as_old])
    writable, left = [], []
    for change in changes:
        entry, skipped = held.get(change.path, (None, False))
        staged = entry is not None and entry not in (change.old, change.new)
        known = change.path in as_old or change.path in landed
        known = known or (skipped and not os.path.lexists(checkout.absolute(change.path)))
        if known and not staged:
            writable.append(change)
        else:
            left.append(change.path)
    return writable, left


def _write_files(
    checkout: Checkout, aside: Aside, private: git.Git, changes: Sequence[Change], noted: Noted, left: list[bytes]
) -> None:
    """Write the files of ``changes``; paths that hold anything but what was ``noted`` go to ``left``."""
    root = os.fsencode(checkout.root)
    taken = []
    for change in changes:
        if beyond_link(root, change.path) or not aside.take(change.path, noted.get(change.path)):
            left.append(change.path)
        else:
            taken.append(change)
    point("promote.set_aside")
    files = {change.path for change in taken if change.new.mode != "000000"}
    for change in taken:
        if change.old.mode == GITLINK and change.new.mode != GITLINK:
            with contextlib.suppress(OSError):
                os.rmdir(checkout.absolute(change.path))  # git leaves a submodule that was checked out
        if change.new.mode == "000000" and files.intersection(parents(change.path)):
            drop_empty_dirs(root, change.path)
    present = []
    for change in taken:
        if change.new.mode == "000000":
            continue
        path = checkout.absolute(change.path)
        if change.new.mode == GITLINK:
            with contextlib.suppress(OSError):
                os.makedirs(path, exist_ok=True)
            continue
        if os.path.isdir(path) and not os.path.islink(path):
            remove_empty(path)  # an empty one makes room, as with git
        if os.path.lexists(path) or file_above(root, change.path):
            left.append(change.path)
        else:
            present.append(change.path)
    left += _write_new(checkout, private, present)
    for change in taken:
        if change.new.mode == "000000":
            drop_empty_dirs(root, change.path)
    point("promote.files_written")
    left += aside.drop(noted, lambda late: late.intersection(present) - _differing(private))


def _differing(private: git.Git) -> set[bytes]:
    """The tracked paths whose file is not what the index says that git has written."""
    # Where git left a file as it found it, it noted none of those that it wrote.
    private.run("update-index", "-q", "--refresh", ok=(0, 1), timeout=git.CONTENT)
    return set(git.records(private.run("diff-files", "-z", "--name-only", timeout=git.CONTENT).out))


def _write_new(checkout: Checkout, private: git.Git, paths: list[bytes]) -> list[bytes]:
    """Let git write files where none are; moves the paths where one has appeared from ``paths`` to the answer."""
    root = os.fsencode(checkout.root)
    appeared: set[bytes] = set()
    pending = list(paths)
    while pending:
        stdin = b"".join(path + b"\0" for path in pending)
        # Never forced: git makes each file itself, or leaves what it finds.
        done = private.run("checkout-index", "-u", "-z", "--stdin", stdin=stdin, ok=(0, 1, 128), timeout=git.CONTENT)
        if done.code == 0:
            break
        if not all(line.endswith(_APPEARED) for line in done.err.splitlines()):
            raise git.failure(("checkout-index",), done)
        differing = _differing(private)
        behind = [path for path in pending if path in differing]
        # git gives up where a file has come in the place of a directory.
        missing = [path for path in behind if is_free(root, path) and not file_above(root, path)]
        appeared.update(set(behind).difference(missing))
        if len(missing) == len(pending):
            raise git.failure(("checkout-index",), done)
        pending = missing
    paths[:] = [path for path in paths if path not in appeared]
    return sorted(appeared)


def _index_entries(private: git.Git) -> dict[bytes, tuple[Entry, bool]]:
    entries = {}
    for row in git.records(private.run("ls-files", "-z", "-s", "-v", timeout=git.CONTENT).out):
        meta, _, name = row.partition(b"\t")
        tag, mode, oid, _ = meta.decode("ascii").split(" ")
        entries[name] = (Entry(mode, oid), tag in "Ss")
    return entries


def _index_line(change: Change) -> bytes:
    if change.new.mode == "000000":
        return f"0 {'0' * len(change.new.oid)}\t".encode("ascii") + change.path + b"\0"
    return f"{change.new.mode} {change.new.oid}\t".encode("ascii") + change.path + b"\0"

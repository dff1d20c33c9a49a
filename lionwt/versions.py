"""Which version of a merge's files stands in the checkout, by git's own comparison.

git compares through the filters and the attributes that it would write with, so
what it wrote is found again whatever they do (design section 8: repair on that
merge's paths only).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lionwt import git
from lionwt.checkout import Checkout
from lionwt.evidence import Change
from lionwt.files import is_prefix
from lionwt.listing import GITLINK, SYMLINK, Entry
from lionwt.paths import beyond_link, is_free


def landed(checkout: Checkout, scratch: Path, changes: Sequence[Change]) -> set[bytes]:
    """The paths that hold what the landing writes there, whole or torn, and nothing of the operator's."""
    whole = matching(checkout, scratch, [(change.path, change.new) for change in changes], checkout.root)
    return whole | _torn(checkout, scratch, [change for change in changes if change.path not in whole])


def matching(
    checkout: Checkout, scratch: Path, wanted: Sequence[tuple[bytes, Entry]], top: Path, tree: str | None = None
) -> set[bytes]:
    """The paths below ``top`` whose file is exactly that version (or is absent where the version is).

    Elsewhere than in the checkout the attributes are those of ``tree``.
    """
    index = scratch / "match"
    index.unlink(missing_ok=True)
    private = checkout.private(index, top)
    found = set()
    lines = []
    root = os.fsencode(top)
    for path, entry in wanted:
        if entry.mode == "000000":
            # A directory may become a file; writing looks again whether it has become empty.
            if beyond_link(root, path) or is_free(root, path):
                found.add(path)
        elif entry.mode == GITLINK:
            if is_free(root, path):
                found.add(path)
        else:
            lines.append(f"{entry.mode} {entry.oid}\t".encode("ascii") + path + b"\0")
    if tree is not None:
        private.run("read-tree", tree, timeout=git.CONTENT)
    # D/F pairs cannot share an index, so each side has one of its own.
    private.run("update-index", "-z", "--replace", "--index-info", stdin=b"".join(lines), timeout=git.CONTENT)
    private.run("update-index", "-q", "--refresh", ok=(0, 1), timeout=git.CONTENT)
    listed = private.run("diff-files", "-z", "--name-only", "--no-ext-diff", timeout=git.CONTENT).out
    differing = set(git.records(listed))
    return found | {line.partition(b"\t")[2][:-1] for line in lines} - differing


def _torn(checkout: Checkout, scratch: Path, changes: Sequence[Change]) -> set[bytes]:
    """The paths whose file is a prefix of what the merge would write there."""
    new = [change for change in changes if change.new.mode not in ("000000", SYMLINK, GITLINK)]
    if not new:
        return set()
    index = scratch / "torn"
    private = checkout.private(index)
    lines = b"".join(f"{change.new.mode} {change.new.oid}\t".encode("ascii") + change.path + b"\0" for change in new)
    private.run("update-index", "-z", "--index-info", stdin=lines, timeout=git.CONTENT)
    private.run("checkout-index", "-a", f"--prefix={scratch}/new/", timeout=git.CONTENT)
    return {
        change.path
        for change in new
        if is_prefix(checkout.absolute(change.path), os.path.join(os.fsencode(scratch), b"new", change.path))
    }

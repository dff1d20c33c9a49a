"""A worktree's registration in git: whose it is, and where it says that the worktree stands.

A registration is known by the lease's nonce in its lock file and by the way
between it and the directory: its ``gitdir`` file leads there, and the ``.git``
of the directory back. Whoever moved a worktree with git has changed both, so
neither the place nor the name of a registration proves anything alone (design
sections 3 and 7).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from lionwt import files, git, repository, words
from lionwt.errors import LionwtError
from lionwt.records import Identity


def lock_reason(nonce: str) -> str:
    """What git's lock file of a worktree says: whose it is (design section 7)."""
    return f"lionwt {nonce}"


def read_nonce(admin: Path) -> str | None:
    """The nonce in a registration's lock file, or None."""
    try:
        reason = files.read_small(admin / "locked").decode("utf-8", "replace").strip()
    except OSError:
        return None
    word, _, nonce = reason.partition(" ")
    return nonce if word == "lionwt" else None


def registrations(common_dir: Path) -> Iterator[Path]:
    """Every admin directory of the repository."""
    try:
        entries = sorted(os.listdir(common_dir / "worktrees"))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        yield common_dir / "worktrees" / entry


def registered(common_dir: Path) -> Iterator[tuple[Path, Path]]:
    """Every linked worktree that git knows of, there or not, with its admin directory: a read of files alone."""
    for admin in registrations(common_dir):
        with contextlib.suppress(OSError):
            if (named := _named(admin)) and "\0" not in named:
                yield Path(named).parent, admin


def admin_with_nonce(common_dir: Path, nonce: str, path: Path) -> Path | None:
    """The registration of ``path`` that carries ``nonce``; raises ``worktree_moved`` where that is not certain.

    A lock file is easily copied: it must be the only one, and lead to the worktree.
    """
    found = [admin for admin in registrations(common_dir) if read_nonce(admin) == nonce]
    if not found:
        return None
    foreign = [admin for admin in found if not _leads_to(admin, path)]
    if len(found) == 1 and not foreign:
        return found[0]
    named = (foreign or found)[0]
    raise LionwtError(
        "worktree_moved",
        f"the registration {named} carries the nonce of the lease of {path}, but is not certainly its own; "
        "all of them were left as they are",
        hint=f"if it is yours, unlock it ({words.command('rm', named / 'locked')}), then run the same command again",
    )


def _leads_to(admin: Path, path: Path) -> bool:
    try:
        named = _named(admin)
    except FileNotFoundError:
        named = ""
    except OSError:
        return False
    if not named:  # git was killed before it wrote it; then it wrote nothing into the worktree either
        return not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and not os.listdir(path))
    return named == str(path / ".git")


def _named(admin: Path) -> str:
    """The ``.git`` of the worktree that a registration names; empty where git did not come to write it."""
    named = git.text(files.read_small(admin / "gitdir").rstrip(b"\n"))
    return named and os.path.normpath(admin / named)


def moved_to(identity: Identity, path: Path) -> Path | None:
    """The other place than ``path`` where git has the worktree now; None where there is none.

    A registration is not known by where the worktree was: it and the ``.git``
    of the place that it names must lead to each other.
    """
    admin = Path(identity.admin_dir)
    try:
        named = _named(admin)
    except OSError:
        return None
    place = Path(named).parent
    if not named or os.path.realpath(place) == str(path) or repository.git_dir_of(place) != admin:
        return None
    return place


def move_back(identity: Identity, place: Path, path: Path) -> str:
    """The command that brings a worktree back to ``path``, with its lock if that was taken."""
    # Given twice it moves a locked one. The directory above may have gone as an empty one.
    back = _at(identity, "move", "-f", "-f", place, path)
    lock = f" && {lock_again(identity, path)}" if read_nonce(Path(identity.admin_dir)) != identity.nonce else ""
    return f"{words.command('mkdir', '-p', path.parent)} && {back}{lock}"


def lock_again(identity: Identity, path: Path) -> str:
    """The command that makes the registration of ``path`` carry the lease again."""
    unlock = f"{_at(identity, 'unlock', path)} && " if os.path.lexists(Path(identity.admin_dir, "locked")) else ""
    return unlock + _at(identity, "lock", "--reason", lock_reason(identity.nonce), path)


def _at(identity: Identity, *arguments: str | Path) -> str:
    return words.command("git", "-C", Path(identity.admin_dir).parent.parent, "worktree", *arguments)


def was_made_for(path: Path, admin: Path) -> bool:
    """Whether git made the directory at ``path`` for a registration: its ``.git`` says so.

    A git that was killed before it had written that left nothing else there.
    """
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        said = files.read_small(path / ".git")
    except FileNotFoundError:
        return not os.listdir(path)
    except OSError:
        return False
    wanted = b"gitdir: " + os.fsencode(admin)
    return said.rstrip(b"\n") == wanted or (wanted.startswith(said) and os.listdir(path) == [".git"])

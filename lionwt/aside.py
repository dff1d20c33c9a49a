"""Move an operator's files out of a landing's way, so that nothing of theirs is ever written over.

Between a look at a file and the write to it, its owner may save another version.
So nothing is written where a file is: what stands at a path is first moved aside
by one rename, looked at where nobody else finds it, and put back when it is not
what the look had seen. What is written then is made anew and never forced, so a
file that appears meanwhile stays. What was moved goes when the new version
stands, after one more look, since an editor may still have held it open. Only an
editor that opens the new file while git fills it shares it with git.

A crash leaves the moved files where they are, under a name that the landing's
journal knows; :meth:`Aside.give_back` puts them where they were before the
repair looks at anything (design section 7, promote 6, and section 8).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from lionwt.paths import beyond_link, files_below
from lionwt.values import State

#: What tells one version of a file from another: file system, inode, size, modification time, mode.
Version = tuple[int, int, int, int, int]
#: The versions at the paths of a landing, as a look found them.
Noted = dict[bytes, "Version | None"]

#: Below the place, where no path of a checkout leads.
_BESIDE: Final = b".git"
_NOT_THERE: Final = (FileNotFoundError, NotADirectoryError)
#: Mounted below the checkout, so that there is no place beside it; or in a directory of somebody else's.
_CANNOT_BE_MOVED: Final = (errno.EXDEV, errno.EACCES, errno.EPERM, errno.EBUSY)


def version(path: bytes) -> Version | None:
    """What stands at ``path``, or None."""
    try:
        seen = os.lstat(path)
    except _NOT_THERE:
        return None
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_mode


def note(root: bytes, paths: Iterable[bytes]) -> Noted:
    """The versions that stand at ``paths`` below ``root``; what lies behind a link there is not at the path."""
    return {path: None if beyond_link(root, path) else version(os.path.join(root, path)) for path in paths}


class Aside(State):
    """The files of the checkout ``root`` that were moved to ``place``, each under its own path."""

    root: bytes
    place: bytes

    def take(self, path: bytes, noted: Version | None) -> bool:
        """Move what stands at ``path`` aside; False, and it stays, where that is not the ``noted`` version."""
        source, target = os.path.join(self.root, path), os.path.join(self.place, path)
        if noted is None:
            return not os.path.lexists(source)
        if stat.S_ISDIR(noted[-1]):
            return True  # emptied by what is taken from below it, or in the way of the writing
        if os.path.lexists(target) or beyond_link(self.place, path):
            return False  # another version of the owner's is kept there, or a link was moved
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        try:
            os.rename(source, target)
        except _NOT_THERE:
            return False
        except OSError as error:
            if error.errno not in _CANNOT_BE_MOVED:
                raise
            return False  # told, and left as it is
        if version(target) == noted:
            return True
        _put(target, source)
        return False

    def drop(self, noted: Noted, are_landed: Callable[[set[bytes]], set[bytes]]) -> list[bytes]:
        """Delete what was moved, once the landing's files stand in its place.

        Returns the paths where the moved file had still been written to. It stands
        there again where ``are_landed`` names the path as nothing but the landing's;
        where its owner has made another one since, it stays in the place.
        """
        late, covered = [], set()
        for path in list(self._paths()):
            moved = os.path.join(self.place, path)
            if version(moved) == noted.get(path):
                os.unlink(moved)
                continue
            late.append(path)
            if not _put(moved, os.path.join(self.root, path)):
                covered.add(path)
        standing = note(self.root, covered)
        for path in are_landed(covered) if covered else ():
            self._exchange(path, standing[path])
        return [*late, *self._clear()]

    def give_back(
        self,
        handled: Collection[bytes],
        is_old: Callable[[bytes], set[bytes]],
        is_landed: Callable[[set[bytes]], set[bytes]],
    ) -> list[bytes]:
        """Put what a dead landing moved where it was; returns the place where some of it has to stay.

        ``is_old`` names the files of the place that hold the version before the
        landing. Of these only the ones at paths that are ``handled`` afterwards are
        needed, and not where something stands by now. What the operator had written
        goes back, unless they have written anew: ``is_landed`` names the paths that
        hold only what the landing wrote.
        """
        if not os.path.isdir(self.place):
            return []
        self._undo_exchanges()
        seen = note(self.place, self._paths())
        old = is_old(self.place)
        taken = set()
        for path in list(self._paths()):
            if path in old and path not in handled:
                self._let_go(path, seen[path])
            elif not self._return(path):
                taken.add(path)
        for path in taken & old:
            self._let_go(path, seen[path])
        taken -= old
        standing = note(self.root, taken)
        for path in is_landed(taken) if taken else ():
            self._exchange(path, standing[path])
        return self._clear()

    def _let_go(self, path: bytes, seen: Version | None) -> None:
        """Delete a moved file that git has, unless it was written to since it was looked at."""
        moved = os.path.join(self.place, path)
        if version(moved) == seen:
            os.unlink(moved)

    def _exchange(self, path: bytes, landed: Version | None) -> None:
        """Put a moved file back in the place of the ``landed`` version; both stay where another stands there."""
        source, beside = os.path.join(self.root, path), os.path.join(self.place, _BESIDE, path)
        if os.path.lexists(beside):
            return
        with contextlib.suppress(OSError):  # a directory has come
            os.makedirs(os.path.dirname(beside), exist_ok=True)
            os.rename(source, beside)
            if version(beside) == landed:
                os.unlink(beside)
                _put(os.path.join(self.place, path), source)
            else:
                _put(beside, source)

    def _undo_exchanges(self) -> None:
        """Put back what an exchange that was killed had taken away."""
        beside = Aside(os.path.join(self.root), os.path.join(self.place, _BESIDE))
        for path in list(beside._paths()):
            beside._return(path)

    def _return(self, path: bytes) -> bool:
        source = os.path.join(self.root, path)
        try:
            os.makedirs(os.path.dirname(source), exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            return False
        return _put(os.path.join(self.place, path), source)

    def _paths(self) -> Iterator[bytes]:
        return files_below(self.place, skip=_BESIDE)

    def _clear(self) -> list[bytes]:
        """Remove the place; returns it where something is left in it."""
        for parent, _, _ in os.walk(self.place, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(parent)
        return [self.place] if os.path.lexists(self.place) else []


def _put(moved: bytes, source: bytes) -> bool:
    """Move a file to where nothing stands; False where something does."""
    try:
        os.link(moved, source, follow_symlinks=False)
    except FileExistsError:
        if version(moved) != version(source):
            return False
        # Both are names of one file: a put that was killed.
    except OSError:  # a file system without links, or a directory
        if os.path.lexists(source):
            return False
        os.rename(moved, source)
        return True
    os.unlink(moved)
    return True

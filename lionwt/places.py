"""Where worktrees lie: ``.worktrees`` of the main worktree, which no status of the operator's shows.

One line in the common exclude hides it; where a ``.gitignore`` brings it back, a
file of lionwt's own in it does. No directory of the way there may lead elsewhere
(design sections 3 and 7).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lionwt import files, git, names, store
from lionwt.errors import LionwtError
from lionwt.records import RunFile

EXCLUDE_LINE = b"/.worktrees/"
#: Of ``.worktrees/.gitignore``, where the repository's own .gitignore brings back what the exclude line hides.
OWN_IGNORE = b"*\n# made by lionwt, and removed with the last lease\n"


def exclude(common_dir: Path) -> None:
    """Keep ``.worktrees`` out of the operator's status: one line, once, in the common exclude."""
    path = common_dir / "info" / "exclude"
    content = _exclude_content(common_dir)
    if EXCLUDE_LINE in content.split(b"\n"):
        return
    path.parent.mkdir(exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    separator = b"" if not content or content.endswith(b"\n") else b"\n"
    store.replace_bytes(path, content + separator + EXCLUDE_LINE + b"\n", mode)


def _exclude_content(common_dir: Path) -> bytes:
    """What the common exclude holds; raises ``path_unsafe`` where lionwt would have to write through a link."""
    path = common_dir / "info" / "exclude"
    try:
        content = files.read_small(path, follow=True)
    except FileNotFoundError:
        content = b""
    linked = path.is_symlink() or path.parent.is_symlink()
    if linked and EXCLUDE_LINE not in content.split(b"\n"):
        raise LionwtError(
            "path_unsafe",
            f"{path} is a symbolic link, so lionwt does not write it; nothing was made",
            hint=f"add the line {EXCLUDE_LINE.decode()} to it yourself",
        )
    return content


def hide(run: RunFile) -> None:
    """Ignore what lies in ``.worktrees`` from within, where the exclude line does not suffice.

    A ``.gitignore`` counts before it, and the deepest one first. Call under the
    registration lock, when the directory is there.
    """
    main_worktree, common_dir = Path(run.main_worktree.path), Path(run.common_dir.path)
    own = names.worktrees_root(main_worktree) / ".gitignore"
    above = (main_worktree / ".gitignore", common_dir / "info" / "exclude")
    if not any(_brings_back(path) for path in (*above, own)) or _is_hidden(run):
        return
    if is_own_ignore(own) or not os.path.lexists(own):
        own.write_bytes(OWN_IGNORE)
        if _is_hidden(run):
            return
    raise LionwtError(
        "path_unsafe",
        f"the worktrees in {own.parent} would show in the status of {main_worktree}; nothing was made",
        hint=f"end {main_worktree / '.gitignore'} with the line {EXCLUDE_LINE.decode()}, and move {own} away",
    )


def is_own_ignore(path: Path) -> bool:
    """Whether it is what lionwt wrote; killed at that, it had written nothing yet."""
    try:
        return files.read_small(path) in (OWN_IGNORE, b"")
    except OSError:
        return False


def _brings_back(path: Path) -> bool:
    """Whether a list of what is ignored holds a line that takes something out again."""
    try:
        return any(line.startswith(b"!") for line in files.read_small(path).split(b"\n"))
    except OSError:
        return False  # git reads none through a link either


def _is_hidden(run: RunFile) -> bool:
    """Whether git ignores the worktrees."""
    place = run.main_worktree.path
    looking = git.shared(run.common_dir.path, work_tree=place).having(cwd=place).with_env(GIT_LITERAL_PATHSPECS="0")
    return not looking.run("check-ignore", "-q", "--no-index", ".worktrees/lionagi/", ok=(0, 1)).code


def check(common_dir: Path, main_worktree: Path, run_id: str) -> None:
    """Refuse, before anything is made, where the worktrees would lie elsewhere or show in the status."""
    path = main_worktree
    for part in (".worktrees", "lionagi", run_id):
        path = path / part
        if os.path.lexists(path):
            _require_own_directory(path)
    _exclude_content(common_dir)


def _require_own_directory(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        raise LionwtError(
            "path_unsafe",
            f"{path} is not a directory of its own; nothing was made",
            hint="move it away: lionwt keeps the worktrees there",
        )


def make_parents(main_worktree: Path, run_id: str, *, is_shared: bool = False) -> Path:
    """Make the directory of a run's worktrees, through no symbolic link; what runs share is the group's where it is."""
    path = main_worktree
    for part in (".worktrees", "lionagi", run_id):
        path = path / part
        try:
            os.mkdir(path)
        except FileExistsError:
            _require_own_directory(path)
        if is_shared and part != run_id:
            store.open_to_group(path)
    return path

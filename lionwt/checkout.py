"""The operator's checkout: where it is, and whether a landing may come to it.

The ref is the truth and moves first; the checkout follows. Its lock, what is in
its way, and how it is brought forward have rooms of their own
(:mod:`lionwt.indexlock`, :mod:`lionwt.obstacles`, :mod:`lionwt.forward`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lionwt import git, history, names, words
from lionwt.errors import LionwtError
from lionwt.session import Run

#: What file systems cannot always do: where it is "false" git does not look at the difference.
_OF_THE_FILE_SYSTEM: Final = ("core.fileMode", "core.symlinks")
_SETTINGS: Final = r"^core\.(filemode|symlinks|sparsecheckout|sparsecheckoutcone)$"


def blocked(what: str, hint: str) -> LionwtError:
    """The error of an obstacle: exit 4, everything as it was, the candidate stays frozen."""
    return LionwtError("checkout_blocked", f"{what}; nothing was changed and the candidate stays frozen", hint=hint)


class Checkout:
    """The worktree the run was opened in."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.root = Path(run.file.checkout.path)
        self.git_dir = Path(run.file.checkout_git_dir)

    def shared(self) -> git.Git:
        return git.shared(str(self.run.common_dir), git_dir=str(self.git_dir), work_tree=str(self.root))

    def private(self, index: Path, top: Path | None = None) -> git.Git:
        """The private directory over the checkout, or over what of it was moved to ``top``.

        What git calls clean there is clean: modes and links count as they do for the operator's own git.
        """
        flags = [("-c", f"{key}=false") for key in _OF_THE_FILE_SYSTEM if self.setting(key) == "false"]
        made = git.private(self.run.paths.git_dir, self.run.common_dir, work_tree=top or self.root, index=index)
        return made.with_flags(*(word for flag in flags for word in flag))

    def is_on_target(self) -> bool:
        """Whether HEAD is the target's branch."""
        head = self.shared().run("symbolic-ref", "--quiet", "HEAD", ok=(0, 1))
        return git.text(head.out).strip() == self.run.file.target

    def head(self) -> str | None:
        """The commit that is checked out, whatever the branch; None on a branch that has none yet."""
        asked = self.shared().run("rev-parse", "--quiet", "--verify", "HEAD^{commit}", ok=(0, 1, 128))
        return git.text(asked.out).strip() or None

    def require_on_target(self) -> None:
        """Raise ``checkout_blocked`` unless the checkout is quietly on the target, and it alone."""
        target = self.run.file.target
        short = names.short_branch(target)
        # First, because an operation in progress detaches HEAD, and a switch would be the wrong advice.
        if running := history.in_progress(self.git_dir):
            raise blocked(
                f"{self.root} is in the middle of {' and '.join(running)}",
                f"finish or abort it ({words.command('git', '-C', self.root, 'status')} says how), then promote again",
            )
        head = self.shared().run("symbolic-ref", "--quiet", "HEAD", ok=(0, 1))
        on = git.text(head.out).strip()
        switch = words.command("git", "-C", self.root, "switch", short)
        if head.code:
            raise blocked(f"{self.root} has a detached HEAD, not {short!r}", switch)
        if on != target:
            raise blocked(f"{self.root} is on {names.short_branch(on)!r}, not {short!r}", switch)
        if others := self._elsewhere():
            raise blocked(
                f"{short!r} is checked out in {' and '.join(others)} as well",
                f"switch to another branch there: {words.command('git', '-C', others[0], 'switch', 'BRANCH')}",
            )

    def _elsewhere(self) -> list[str]:
        listed = self.shared().run("worktree", "list", "--porcelain", "-z").out
        found = []
        for block in listed.split(b"\0\0"):
            lines = block.strip(b"\0").split(b"\0")
            path = git.text(lines[0].removeprefix(b"worktree "))
            if b"branch " + os.fsencode(self.run.file.target) in lines and os.path.realpath(path) != str(self.root):
                found.append(path)
        # git lists the main worktree of a submodule under its git directory.
        return [path for path in found if os.path.realpath(path) != str(self.git_dir)]

    def absolute(self, path: bytes) -> bytes:
        """Where a path of the repository is in the checkout."""
        return os.path.join(os.fsencode(self.root), path)

    def sparse_definition(self, private: git.Git) -> Path | None:
        """The file that says what the operator has checked out, where that is not everything.

        Only where the index does leave out something: a definition that came
        from elsewhere must not take files out of a whole checkout.
        """
        definition = self.git_dir / "info" / "sparse-checkout"
        if not definition.is_file() or self.setting("core.sparseCheckout") != "true":
            return None
        tagged = git.records(private.run("ls-files", "-z", "-t", timeout=git.CONTENT).out)
        return definition if any(row.startswith(b"S ") for row in tagged) else None

    def setting(self, key: str) -> str:
        """A truth value as the operator's own git has it in the checkout; empty when there is none."""
        return self._settings.get(key.lower(), "")

    @functools.cached_property
    def _settings(self) -> Mapping[str, str]:
        asked = git.operator(self.root).with_env(GIT_DIR=self.git_dir, GIT_COMMON_DIR=self.run.common_dir)
        found = asked.run("config", "-z", "--type=bool", "--get-regexp", _SETTINGS, ok=(0, 1))
        rows = (git.text(row).partition("\n") for row in git.records(found.out))
        return {key: value for key, _, value in rows}

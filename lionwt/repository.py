"""Find the repository once, and know it again later.

Discovery asks git as the operator would, when a run is opened and never again:
afterwards every path comes from the run's file and is compared by device and
inode (design section 8, first row), because a worker can edit whatever
discovery reads.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lionwt import files, git, names, words
from lionwt.errors import LionwtError
from lionwt.records import RunFile
from lionwt.values import Value


class Repository(Value, frozen=True):
    """A non-bare repository as one of its worktrees sees it; all paths are real paths."""

    checkout: Path
    git_dir: Path
    common_dir: Path
    main_worktree: Path
    object_format: str


def discover(start: Path) -> Repository:
    """Find the repository around ``start`` (design section 7).

    Raises ``repository_unsupported`` for none, a bare one, or a directory inside
    a git directory; ``git_failed`` with git's words for one it does not trust.
    """
    asked = git.operator(os.path.realpath(start))
    bare = asked.run("rev-parse", "--is-bare-repository", ok=(0, 128))
    if bare.code:
        raise _no_repository(start, git.text(bare.err).strip())
    inside = asked.run("rev-parse", "--show-toplevel", ok=(0, 128))
    if bare.out.strip() == b"true" or inside.code:
        _refuse_broken_checkout(Path(os.path.realpath(start)))
        raise LionwtError(
            "repository_unsupported",
            f"{start} is in a bare repository, or not in a worktree; lionwt needs a checkout; nothing was made",
            hint="run it in a checkout of the target branch, or name one with --repo",
        )
    checkout = Path(os.path.realpath(git.text(inside.out[:-1])))
    git_dir = Path(os.path.realpath(asked.line("rev-parse", "--absolute-git-dir")))
    common = asked.run("rev-parse", "--path-format=absolute", "--git-common-dir").out[:-1]
    common_dir = Path(os.path.realpath(git.text(common)))
    object_format = asked.line("rev-parse", "--show-object-format")
    if git_dir_of(checkout) != git_dir:
        raise LionwtError(
            "repository_unsafe",
            f"git takes {checkout} for the worktree of {git_dir}, but it is not "
            "(core.worktree in the shared configuration?); nothing was made",
            hint=f"look at: {words.command('git', 'config', '--file', common_dir / 'config', 'core.worktree')}",
        )
    main_worktree = _main_worktree(checkout, git_dir, common_dir)
    if git_dir != common_dir and _is_bare(common_dir):
        raise _unsafe(common_dir, "core.bare")
    return Repository(checkout, git_dir, common_dir, main_worktree, object_format)


def _refuse_broken_checkout(start: Path) -> None:
    """Tell a checkout that core.bare has broken (``git init`` in a linked worktree does) from a bare repository."""
    for parent in (start, *start.parents):
        git_dir = git_dir_of(parent)
        if git_dir is not None:
            if (git_dir / "index").exists() and _is_bare(git_dir):
                raise _unsafe(git_dir, "core.bare")
            return


def _is_bare(common_dir: Path) -> bool:
    reader = git.Git(env=git.shared(str(common_dir)).env)
    bare = reader.run("config", "--file", common_dir / "config", "--type=bool", "--get", "core.bare", ok=(0, 1, 128))
    return bare.code == 0 and bare.out.strip() == b"true"


def _no_repository(start: Path, said: str) -> LionwtError:
    if "dubious ownership" in said:
        return LionwtError(
            "git_failed",
            f"git does not trust the repository at {start}: {said}; nothing was made",
            hint="add it to safe.directory in your own git configuration if you trust it",
        )
    if "not a git repository" in said:
        return LionwtError(
            "repository_unsupported",
            f"{start} is not inside a git repository; nothing was made",
            hint="run it in a checkout of the target branch, or name one with --repo",
        )
    return LionwtError("git_failed", f"git cannot open the repository at {start}: {said}; nothing was made")


def git_dir_of(worktree: Path) -> Path | None:
    """The git directory that a worktree's own ``.git`` names."""
    entry = worktree / ".git"
    try:
        if entry.is_dir():
            return Path(os.path.realpath(entry))
        if not entry.is_file():  # a FIFO would be waited for
            return None
        content = files.read_small(entry, follow=True)
    except OSError:
        return None
    if not content.startswith(b"gitdir: "):
        return None
    named = git.text(content[len(b"gitdir: ") :].rstrip(b"\r\n"))
    return Path(os.path.realpath(worktree / named))


def _main_worktree(checkout: Path, git_dir: Path, common_dir: Path) -> Path:
    """Where the main worktree lies, whichever worktree one stands in.

    git's own list takes the parent of the common directory, which is wrong for
    a submodule's repository.
    """
    if git_dir == common_dir:
        return checkout
    parent = common_dir.parent
    if git_dir_of(parent) == common_dir:
        return parent
    named = git.Git(env=git.shared(str(common_dir)).env).run(
        "config", "--file", common_dir / "config", "--get", "core.worktree", ok=(0, 1)
    )
    if named.code == 0:
        candidate = Path(os.path.realpath(common_dir / git.text(named.out[:-1])))
        if git_dir_of(candidate) == common_dir:
            return candidate
    raise LionwtError(
        "repository_unsupported",
        f"the repository {common_dir} has no main worktree (it is bare); nothing was made",
        hint="lionwt keeps its worktrees in the main worktree; use a clone with a checkout",
    )


def linked_ref(head: str | os.PathLike[str]) -> str | None:
    """The ref that a symbolic link in the place of a HEAD names, as core.preferSymlinkRefs makes it."""
    try:
        named = os.readlink(head)
    except OSError:
        return None
    return named if named.startswith("refs/") else None


class Branch(Value, frozen=True):
    """A branch as it stands: its full name, commit, and the ref it stands for if it is symbolic."""

    full: str
    oid: str
    symref: str


def find_branches(common_dir: str, *patterns: str) -> dict[str, Branch]:
    """The refs that match ``patterns``, by full name."""
    found = git.shared(common_dir).run("for-each-ref", "--format=%(refname)%00%(objectname)%00%(symref)%00", *patterns)
    parts = found.out.split(b"\0")
    branches = {}
    for start in range(0, len(parts) - 3, 3):
        full, oid, symref = (git.text(part) for part in parts[start : start + 3])
        full = full.lstrip("\n")
        branches[full] = Branch(full, oid, symref)
    return branches


def find_tip(common_dir: str, full: str) -> str | None:
    """The commit that the one ref ``full`` names, or None.

    Unlike a pattern, for which git reads every ref of the same directory.
    """
    found = git.shared(common_dir).run("show-ref", "--verify", "--hash", full, ok=(0, 1, 128))
    if found.code == 0:
        return git.text(found.out).strip()
    if b"not a valid ref" in found.err:
        return None
    raise git.failure(("show-ref",), found)


def resolve_target(common_dir: str, name: str) -> Branch:
    """The branch that ``name`` means, followed through symrefs (design section 4).

    Raises ``target_invalid`` for anything but an existing branch, and
    ``repository_unsupported`` for a repository without commits.
    """
    short = name[len(names.HEADS) :] if name.startswith(names.HEADS) else name
    spellings = [names.HEADS + short]
    if short.startswith("heads/"):
        spellings.append("refs/" + short)
    found: dict[str, Branch] = {}
    if _could_be_branch(short):
        found = find_branches(common_dir, *spellings)
    full = next((spelling for spelling in spellings if spelling in found), None)
    if full is None:
        if not find_branches(common_dir, "refs/heads"):
            raise LionwtError(
                "repository_unsupported",
                "the repository has no commits yet; nothing was made",
                hint="make a first commit on the target branch",
            )
        raise LionwtError(
            "target_invalid",
            f"{name!r} is not the name of an existing branch; nothing was made",
            hint="name the run's own working branch; git switch -c BRANCH makes one",
        )
    branch = found[full]
    if branch.symref:
        final = git.shared(common_dir).line("symbolic-ref", "-q", full)
        if not final.startswith(names.HEADS):
            raise LionwtError("target_invalid", f"{name!r} stands for {final}, which is not a branch; nothing was made")
        branch = Branch(final, branch.oid, "")
    return branch


def _could_be_branch(short: str) -> bool:
    return bool(short) and short not in ("HEAD", "@") and not short.startswith("-") and "\0" not in short


def default_branches(common_dir: str) -> list[str]:
    """The default branches that the remotes name today."""
    heads = find_branches(common_dir, "refs/remotes/*/HEAD", "refs/remotes/**/HEAD")
    found = []
    for branch in heads.values():
        remote = branch.full.split("/")[2] if branch.symref else ""
        prefix = f"refs/remotes/{remote}/"
        if remote and branch.symref.startswith(prefix):
            found.append(branch.symref[len(prefix) :])
    return sorted(set(found))


def require_unprotected(full: str, more: Iterable[str]) -> None:
    """Raise ``protected_target`` when a landing may never move ``full`` (ADR-0091 A1.3)."""
    if names.is_protected(full, more):
        raise LionwtError(
            "protected_target",
            f"{names.short_branch(full)!r} is a protected branch and never the target of a landing; "
            "nothing was changed",
            hint="land on a working branch of the run's own; merging that into a protected branch is yours to do",
        )


def verify_unmoved(run: RunFile) -> None:
    """Raise ``repository_moved`` unless repository and checkout are the recorded ones."""
    for what, place in (
        ("repository", run.common_dir),
        ("main worktree", run.main_worktree),
        ("checkout", run.checkout),
    ):
        if not place.stands():
            hint = "put it back where it was, then run the same command again"
            if what == "checkout":  # another one of the same name is not the one that a landing has to bring forward
                worktrees = names.worktree_path(Path(run.main_worktree.path), run.run_id, "x").parent
                hint += (
                    f"; if it is lost, nothing can be landed there any more: the workers' files lie in {worktrees}, "
                    f"what was frozen in {Path(run.artifact_root) / '.lionwt'}"
                )
            raise LionwtError(
                "repository_moved",
                f"the {what} of run {run.run_id!r} is not the directory it was opened with ({place.path}); "
                "nothing was changed",
                hint=hint,
            )
    if git_dir_of(Path(run.checkout.path)) != Path(run.checkout_git_dir):
        raise LionwtError(
            "repository_moved",
            f"the .git of {run.checkout.path} no longer leads to {run.checkout_git_dir}; nothing was changed",
            hint="repair it with: git worktree repair",
        )


def config_fingerprint(common_dir: Path) -> str:
    """A hash over the shared configuration files."""
    digest = hashlib.sha256()
    for name in ("config", "config.worktree", "info/attributes"):
        _add_file(digest, common_dir / name, name)
    return digest.hexdigest()


def hooks_fingerprint(common_dir: Path) -> str:
    """A hash over names, modes and contents of the shared hooks."""
    digest = hashlib.sha256()
    hooks = common_dir / "hooks"
    try:
        entries = sorted(os.listdir(hooks))
    except OSError:
        entries = []
    for name in entries:
        _add_file(digest, hooks / name, name)
    return digest.hexdigest()


def _add_file(digest: Any, path: Path, name: str) -> None:
    digest.update(os.fsencode(name) + b"\0")
    try:
        seen = os.lstat(path)
        digest.update(f"{stat.S_IFMT(seen.st_mode):o} {seen.st_mode & 0o111:o}\0".encode())
        if stat.S_ISLNK(seen.st_mode):
            digest.update(os.fsencode(os.readlink(path)))
        elif stat.S_ISREG(seen.st_mode):
            if seen.st_size > files.LARGEST:  # sparse, it would be read for hours
                digest.update(f"{seen.st_size} {seen.st_mtime_ns}\0".encode())
                return
            with files.open_regular(path) as file:
                for block in iter(lambda: file.read(1 << 20), b""):
                    digest.update(block)
    except OSError as error:
        digest.update(f"errno {error.errno}".encode())
    digest.update(b"\0")


def changes_of_shared_config(run: RunFile) -> dict[str, str]:
    """What of the shared configuration differs from the opening of the run, by diagnostic code."""
    common = Path(run.common_dir.path)
    changes = {}
    if config_fingerprint(common) != run.config_sha256:
        changes["shared_config_changed"] = f"{common / 'config'} was changed since the run was opened"
    if hooks_fingerprint(common) != run.hooks_sha256:
        changes["shared_hooks_changed"] = f"{common / 'hooks'} was changed since the run was opened"
    return changes


def is_partial_clone(common_dir: Path) -> bool:
    """Whether objects may be missing here that a remote has."""
    reader = git.Git(env=git.shared(str(common_dir)).env)
    found = reader.run(
        "config", "--file", common_dir / "config", "--get-regexp", r"^(extensions\.partialclone|remote\..*\.promisor)$",
        ok=(0, 1, 128),
    )  # fmt: skip
    return found.code == 0


def require_safe_config(run: RunFile) -> None:
    """Raise ``repository_unsafe`` when a changed shared config makes git act elsewhere.

    ``core.bare`` or ``core.worktree`` there breaks the operator's own checkout;
    lionwt never writes the shared configuration, so a person has to.
    """
    if "shared_config_changed" not in changes_of_shared_config(run):
        return
    common = Path(run.common_dir.path)
    if _is_bare(common):
        raise _unsafe(common, "core.bare")
    reader = git.Git(env=git.shared(str(common)).env)
    tree = reader.run("config", "--file", common / "config", "--get", "core.worktree", ok=(0, 1, 128))
    if tree.code == 0:
        named = os.path.realpath(common / git.text(tree.out[:-1]))
        if named != run.main_worktree.path:
            raise _unsafe(common, "core.worktree")


def _unsafe(common: Path, setting: str) -> LionwtError:
    return LionwtError(
        "repository_unsafe",
        f"{setting} in {common / 'config'} breaks the checkout of that repository (a git init in a linked worktree "
        "sets it, or a worker did); nothing was changed",
        hint="remove it with: " + words.command("git", "config", "--file", common / "config", "--unset-all", setting),
    )


def place_of_start() -> Path:
    """The current directory, in which to look for the repository where none was named."""
    try:
        return Path(os.getcwd())
    except FileNotFoundError as error:
        raise LionwtError(
            "usage", "the current directory has been removed; nothing was made", hint="cd somewhere, or use --repo"
        ) from error

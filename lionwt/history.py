"""What a worker did to its history, read without trusting it.

Only refs and commits are looked at; the content of a candidate comes from the
captured tree alone, wherever the worker's HEAD has gone (design section 7,
freeze 5). Refs are looked up in the shared directory; which commits are whose
parents is read through the run's private one, where no graft, shallow file or
commit-graph of a worker's says otherwise.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from lionwt import files, git, mounts, names, repository, trees, words
from lionwt.errors import LionwtError
from lionwt.records import Identity, Lease, LeaseFile, RunFile
from lionwt.values import Value

_IN_PROGRESS = {
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase or am",
    "BISECT_LOG": "a bisect",
}

#: Files of a worktree that name a commit which may be reachable from nowhere else.
_NAMING = ("ORIG_HEAD", "MERGE_HEAD", "MERGE_AUTOSTASH", "CHERRY_PICK_HEAD", "REVERT_HEAD", "REBASE_HEAD")

# Reflog entries of commits that came into being here; a rebase's start and a
# fast-forward name commits that others made.
_MADE_HERE = re.compile(
    r"(commit( \([a-z-]+\))?|revert|am|cherry-pick"
    r"|(rebase|pull)( .*)? \((pick|reword|edit|squash|fixup|continue|merge)\)): (?!fast-forward$)"
)

_NO_BRANCH = "no branch"
_MOVED = re.compile(r"checkout: moving from (\S+) to (\S+)")
_STASHED = re.compile(r"\S*@\{(?P<at>\d+)\} (?:(?:WIP on|On) (?:\(no branch\)|(?P<branch>[^ :]+)): )?")


def in_progress(git_dir: Path) -> list[str]:
    """The git operations that a worktree is in the middle of."""
    return sorted({what for name, what in _IN_PROGRESS.items() if os.path.lexists(git_dir / name)})


class History(Value, frozen=True):
    """Where a worker's HEAD and branch stand, and whether its commits form a line from the base.

    ``blocker`` says why the change cannot be landed whatever its content is;
    ``tips`` are all commits that only this worktree remembers.
    """

    head: str | None
    head_ref: str | None
    branch_tip: str | None
    line: tuple[str, ...]
    is_line: bool
    blocker: str | None
    notes: tuple[tuple[str, str], ...]
    tips: tuple[str, ...]


def read(run: RunFile, private_dir: Path, file: LeaseFile, identity: Identity, recorded: Sequence[str] = ()) -> History:
    """Read the history of a lease's worktree; ``recorded`` are the commits that other leases' evidence names."""
    common = git.shared(run.common_dir.path)
    shared = git.shared(run.common_dir.path, git_dir=identity.admin_dir, work_tree=str(file.lease.worktree_path))
    branch = names.HEADS + file.lease.branch_name
    head = head_ref = None
    if _has_head(Path(identity.admin_dir)):
        head, head_ref = _stands(shared)
    # HEAD on the branch has said where that is.
    tip = head if head_ref == branch and head is not None else repository.find_tip(run.common_dir.path, branch)
    notes: list[tuple[str, str]] = []
    if head is None:
        notes.append(("worker_left_base", "HEAD names no commit; the change is one commit on the base"))
    elif head_ref != branch:
        where = head_ref or "a detached HEAD"
        notes.append(("worker_left_branch", f"the worker left {file.lease.branch_name} for {where}"))
    if tip is None:
        notes.append(("worker_left_branch", f"the worker deleted or renamed {file.lease.branch_name}"))
    elif head is not None and tip != head:
        notes.append(("worker_left_branch", f"{file.lease.branch_name} is at {tip}, HEAD at {head}"))
    notes += _unreadable_reflog(shared)
    if "refs/stash" in repository.find_branches(run.common_dir.path, "refs/stash"):
        notes += _stashes(common, shared, file.lease, is_detached=head_ref is None)
    if head in (None, run.base_sha) and tip in (None, run.base_sha):
        # Nothing was committed, unless HEAD has been somewhere and come back.
        tips = _remembered(shared, run.base_sha, branch)
        return History(head, head_ref, tip, (), head is not None, None, tuple(notes), tips)
    line, is_line, blocker = _line(run, private_dir, file, shared, head, head_ref, recorded)
    if head is not None and not is_line:
        notes.append(
            ("worker_left_base", "the worker's commits are no line from the base; the change is one commit on it")
        )
    tips = tuple(dict.fromkeys(oid for oid in (head, tip, *_remembered(shared, run.base_sha, branch)) if oid))
    return History(head, head_ref, tip, line, is_line, blocker, tuple(notes), tips)


def _has_head(admin: Path) -> bool:
    """Whether git can be asked for HEAD: for a FIFO in its place it would wait."""
    head = admin / "HEAD"
    return repository.linked_ref(head) is not None or head.is_file()


def _stands(shared: git.Git) -> tuple[str | None, str | None]:
    """The commit that HEAD names, and the branch through which it does."""
    said = shared.run("rev-parse", "--quiet", "HEAD^{commit}", "--symbolic-full-name", "HEAD", ok=(0, 1, 128))
    words_of_it = git.text(said.out).split("\n")
    if said.code == 0 and len(words_of_it) == 3 and words_of_it[1].startswith("refs/"):
        return words_of_it[0], words_of_it[1]
    return (
        _maybe(shared, "rev-parse", "--quiet", "--verify", "HEAD^{commit}"),
        _maybe(shared, "symbolic-ref", "--quiet", "HEAD"),
    )


def _maybe(shared: git.Git, *arguments: str) -> str | None:
    result = shared.run(*arguments, ok=(0, 1, 128))
    return git.text(result.out).strip() or None if result.code == 0 else None


def _line(
    run: RunFile,
    private_dir: Path,
    file: LeaseFile,
    shared: git.Git,
    head: str | None,
    head_ref: str | None,
    recorded: Sequence[str],
) -> tuple[tuple[str, ...], bool, str | None]:
    """The worker's commits from the base, oldest first; whether they are a line; what forbids landing."""
    if head is None:
        return (), False, None
    objects = git.private(private_dir, run.common_dir.path)
    listed = objects.run("rev-list", "--parents", "--topo-order", "--reverse", f"^{run.base_sha}", head, "--")
    rows = [row.split() for row in listed.out.decode("ascii").splitlines()]
    line = tuple(row[0] for row in rows)
    is_line = True
    parent = run.base_sha
    for row in rows:
        if row[1:] != [parent]:
            is_line = False
            break
        parent = row[0]
    is_line = is_line and parent == head
    foreign = _foreign(run, objects, file, shared, line, head, head_ref, recorded)
    if foreign:
        merged = words.count(len(foreign), "commit was", "commits were")
        return line, is_line, f"{merged} merged in from elsewhere: {words.some(foreign)}"
    return line, is_line, None


def _foreign(
    run: RunFile,
    objects: git.Git,
    file: LeaseFile,
    shared: git.Git,
    line: tuple[str, ...],
    head: str,
    head_ref: str | None,
    recorded: Sequence[str],
) -> list[str]:
    """Commits of the line that another ref or lease holds and that were not made in this worktree."""
    if not line:
        return []
    own = {names.HEADS + file.lease.branch_name}
    # A branch that the worker made and stands on is its own; the target never is.
    if head_ref and head_ref.startswith(names.HEADS) and head_ref != run.target:
        own.add(head_ref)
    known = _refs(run)
    # A lease that has ended has no branch any more; what it had made is still not this worker's.
    others = {*recorded, *(oid for name, oid in known.items() if name not in own)}
    revisions = [head, f"^{run.base_sha}", *(f"^{oid}" for oid in sorted(others))]
    only_here = objects.run("rev-list", "--ignore-missing", "--stdin", stdin="\n".join([*revisions, ""]).encode())
    elsewhere = set(line) - set(only_here.out.decode("ascii").split())
    if not elsewhere:
        return []
    made = {oid for oid, message in _reflog(shared) if _MADE_HERE.match(message)}
    return [oid for oid in line if oid in elsewhere - made]


def _refs(run: RunFile) -> dict[str, str]:
    """Every branch, remote branch and tag, by full name."""
    listed = git.shared(run.common_dir.path).run(
        "for-each-ref", "--format=%(objectname) %(refname)", "refs/heads", "refs/remotes", "refs/tags"
    )
    rows = (row.split(" ", 1) for row in git.text(listed.out).split("\n") if row)
    return {name: oid for oid, name in rows}


def _reflog(shared: git.Git) -> list[tuple[str, str]]:
    """The worktree's own reflog of HEAD, newest first: commit and message.

    Read as a file where it is one: a HEAD that the worker spoiled hides nothing then.
    """
    admin = Path(shared.env["GIT_DIR"])
    path = admin / "logs" / "HEAD"
    if os.path.lexists(path):
        return _logged(path)
    if not _has_head(admin):
        return []
    logged = shared.run("reflog", "show", "--format=%H %gs", "HEAD", "--", ok=(0, 128))
    found = [entry.partition(" ") for entry in git.text(logged.out).splitlines()]
    return [(oid, message) for oid, _, message in found]


def _logged(path: Path) -> list[tuple[str, str]]:
    """The entries of a reflog file, newest first: commit and message."""
    try:
        content = files.read_small(path)
    except OSError:
        return []  # git would wait for a FIFO; a diagnostic names it
    rows = [row.partition("\t") for row in git.text(content).split("\n")]
    entries = [(meta.split(" ")[1:2], message) for meta, _, message in rows]
    return [(oid[0], message) for oid, message in reversed(entries) if oid and git.is_oid(oid[0])]


def _unreadable_reflog(shared: git.Git) -> list[tuple[str, str]]:
    path = Path(shared.env["GIT_DIR"], "logs", "HEAD")
    try:
        files.read_small(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        return [("reflog_unreadable", f"{path} is not read ({error.strerror}): commits that HEAD has left are unknown")]
    return []


def _remembered(shared: git.Git, base: str, branch: str) -> tuple[str, ...]:
    """The commits that HEAD and the branch have been at, and those that an operation of the worktree's names."""
    admin = Path(shared.env["GIT_DIR"])
    oids = dict.fromkeys(oid for oid, _ in _reflog(shared))
    oids.update(dict.fromkeys(named_by_branch(shared.env["GIT_COMMON_DIR"], branch)))
    oids.update(dict.fromkeys(_named_by_operations(admin)))
    return tuple(oid for oid in oids if oid != base and oid.strip("0"))


def named_by_branch(common_dir: str, branch: str) -> list[str]:
    """The commits in the reflog of a branch (its full name), newest first; it goes with the branch."""
    return [oid for oid, _ in _logged(Path(common_dir, "logs", branch))]


def _named_by_operations(admin: Path) -> list[str]:
    """What an operation that was never finished names: an autostash, where a rebase began, a worktree's own refs."""
    paths = [admin / name for name in _NAMING]
    for directory in ("rebase-merge", "rebase-apply"):
        paths += [admin / directory / name for name in ("autostash", "orig-head", "stopped-sha", "amend")]
    for parent, _, inside in trees.walk(os.fspath(admin / "refs")):
        paths += [Path(parent, name) for name in inside]
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            found += [word for word in git.text(files.read_small(path)).split()[:1] if git.is_oid(word)]
    return found


def _stashes(common: git.Git, shared: git.Git, lease: Lease, is_detached: bool) -> list[tuple[str, str]]:
    """The entries of the repository's one stash that came from this worktree since it was leased.

    An entry says on which branch it was made: the lease's own, one that this HEAD has been on, or none.
    """
    logged = common.run("reflog", "show", "--date=unix", "--format=%gd %gs", "refs/stash", "--", ok=(0, 128))
    moves = [move.groups() for _, message in _reflog(shared) if (move := _MOVED.fullmatch(message))]
    stood = {word for move in moves for word in move}
    # A HEAD that leaves no branch leaves a commit.
    if is_detached or any(git.is_oid(left) for left, _ in moves):
        stood.add(_NO_BRANCH)
    own = others = 0
    where: dict[str, None] = {}
    for entry in git.text(logged.out).split("\n"):
        named = _STASHED.match(entry)
        if named is None or int(named["at"]) < int(lease.created_at):
            continue
        branch = named["branch"] or _NO_BRANCH
        if branch == lease.branch_name:
            own += 1
        elif branch in stood:
            others += 1
            where[branch] = None
    found = [words.count(own, "stash entry of this branch", "stash entries of this branch")] if own else []
    if others:
        been = f"of {', '.join(where)}, where this HEAD has been,"
        found.append(words.count(others, f"stash entry {been}", f"stash entries {been}"))
    stay = "stays" if own + others == 1 else "stay"
    return [("stash_entries", f"{' and '.join(found)} {stay} in the repository's one stash")] if found else []


def save_commits(run: RunFile, private_dir: Path, scratch: Path, tips: tuple[str, ...], target: Path) -> bool:
    """Bundle the commits that only the worktree remembers; False when there are none."""
    objects = git.private(private_dir, run.common_dir.path)
    wanted = existing(objects, tips)
    if not wanted:
        return False
    new = objects.run("rev-list", "--max-count=1", *wanted, f"^{run.base_sha}", "--")
    if not new.out:
        return False
    make_git_dir(scratch, private_dir, {f"refs/heads/{number}": oid for number, oid in enumerate(wanted)})
    git.private(scratch, run.common_dir.path).run(
        "bundle", "create", "--quiet", target, "--all", f"^{run.base_sha}", timeout=git.CONTENT
    )
    return True


def existing(objects: git.Git, oids: Sequence[str]) -> list[str]:
    """Those of ``oids`` that are commits which are there."""
    asked = "".join(f"{oid}^{{commit}}\n" for oid in oids).encode("ascii")
    said = git.text(objects.run("cat-file", "--batch-check", stdin=asked).out).splitlines() if oids else []
    return [oid for oid, line in zip(oids, said, strict=True) if line.split()[1:2] == ["commit"]]


def holds(run: RunFile, private_dir: Path, scratch: Path, bundle: Path, tips: Sequence[str]) -> bool:
    """Whether a bundle is whole and holds all of ``tips``, together with what lies before the base."""
    if bundle.is_symlink() or not bundle.is_file():
        return False
    made = scratch / "held"
    with contextlib.suppress(FileNotFoundError):
        mounts.remove_tree(made)
    make_git_dir(made, private_dir, {"refs/heads/base": run.base_sha})
    alone = git.private(made, made)
    # The store lends what lies before the base; nothing else of it may count.
    lent = alone.with_env(GIT_ALTERNATE_OBJECT_DIRECTORIES=git.quoted(Path(run.common_dir.path, "objects")))
    try:
        lent.run("bundle", "unbundle", bundle, timeout=git.CONTENT)
        named = {line.split(" ")[0] for line in git.text(alone.run("bundle", "list-heads", bundle).out).splitlines()}
        wanted = "\n".join([*tips, f"^{run.base_sha}", ""]).encode("ascii")
        missing = "\n".join([*tips, *(f"^{oid}" for oid in (*sorted(named), run.base_sha)), ""]).encode("ascii")
        if lent.run("rev-list", "--max-count=1", "--stdin", stdin=missing).out:
            return False
        objects = lent.run("rev-list", "--objects", "--no-object-names", "--stdin", stdin=wanted, timeout=git.CONTENT)
        return b" missing\n" not in alone.run("cat-file", "--batch-check", stdin=objects.out, timeout=git.CONTENT).out
    except LionwtError:
        return False


def make_git_dir(where: Path, like: Path, refs: dict[str, str]) -> None:
    """A scratch git directory with ``refs`` and the private directory's settings."""
    for sub in ("objects", "refs"):
        (where / sub).mkdir(parents=True)
    (where / "HEAD").write_bytes(b"ref: refs/heads/none\n")
    for name in ("config", "shallow"):
        if (like / name).exists():
            shutil.copyfile(like / name, where / name)
    # A ref's name is bytes: a worker may have given it any.
    (where / "packed-refs").write_bytes(os.fsencode("".join(f"{oid} {name}\n" for name, oid in sorted(refs.items()))))

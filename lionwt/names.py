"""Identifiers, branches, the protected fence, and where everything lives.

Nothing is ever rewritten to make it fit (design section 4): an id is accepted
as it stands or refused, so that a pair of ids, a branch and a path always name
each other. Everything here is pure; the file system is not consulted, except
for lionagi's own ``run.json``.
"""

from __future__ import annotations

import json
import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from lionwt import words
from lionwt.errors import LionwtError
from lionwt.values import Value

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)

#: Bytes of lionagi's manifest that are read at most.
_LARGEST = 16 << 20

HEADS = "refs/heads/"
ALWAYS_PROTECTED = ("main", "master")


def check_id(value: str, kind: str) -> str:
    """Return ``value`` if it is a safe id, else raise ``id_invalid`` (design section 4)."""
    if (
        not _ID.fullmatch(value)
        or ".." in value
        or value.endswith(".")
        or fold(value).endswith(".lock")
        or value == "HEAD"
    ):
        raise LionwtError(
            "id_invalid",
            f"{kind} id {value!r} is not a safe name; nothing was made",
            hint="use letters, digits, '.', '_' and '-', at most 64, starting with a letter or digit; "
            "no '..', no '.' or '.lock' at the end, and not HEAD",
        )
    return value


def check_session(value: str) -> str:
    """Return a session id that an environment variable and a terminal can carry, else raise ``id_invalid``."""
    if not (0 < len(value) <= 255 and value.isprintable()):
        raise LionwtError(
            "id_invalid",
            f"session id {value!r} is not a printable name of at most 255 characters; nothing was made",
            hint="leave it out, and the run id is used",
        )
    return value


def fold(name: str) -> str:
    """The form under which two names collide on some file system."""
    return unicodedata.normalize("NFKC", name).casefold()


def short_branch(full: str) -> str:
    """``refs/heads/x`` without its prefix."""
    return full[len(HEADS) :] if full.startswith(HEADS) else full


def is_protected(full: str, more: Iterable[str]) -> bool:
    """Whether a landing may never move ``full`` (ADR-0091 A1.3).

    ``more`` adds branch names (short or full, ``*`` matches anything); nothing
    takes one away.
    """
    from fnmatch import fnmatchcase

    name = fold(short_branch(full))
    if name in ALWAYS_PROTECTED or name.startswith("release"):
        return True
    return any(fnmatchcase(name, fold(short_branch(entry))) for entry in more)


def worker_branch(run_id: str, worker_id: str) -> str:
    """The short name of a worker's branch (ADR-0091 D2)."""
    return f"lionagi/{run_id}/{worker_id}"


def anchor_prefix(run_id: str, worker_id: str) -> str:
    """Under this prefix the anchors ``candidate`` and ``head`` live, and the sign ``landed`` (design section 3)."""
    return f"refs/lionwt/{run_id}/{worker_id}/"


def worktrees_root(main_worktree: Path) -> Path:
    return main_worktree / ".worktrees"


def worktree_path(main_worktree: Path, run_id: str, worker_id: str) -> Path:
    """Where a worker's worktree lies (ADR-0091 D2)."""
    return worktrees_root(main_worktree) / "lionagi" / run_id / worker_id


def trash_name(run_id: str, worker_id: str) -> str:
    """A name that a removed tree has in the trash."""
    return f"{run_id}.{worker_id}.{os.urandom(4).hex()}"


def is_trash(name: str) -> bool:
    """Whether :func:`trash_name` makes such names."""
    ids, _, nonce = name.rpartition(".")
    return "." in ids and len(nonce) == 8 and not nonce.strip("0123456789abcdef")


def is_reserved(path: str) -> bool:
    """Whether a path of the repository is, or is below, where lionwt keeps and hides worktrees and removed trees."""
    top, _, rest = path.partition("/")
    return top == ".worktrees" and rest.partition("/")[0] in ("", "lionagi", ".trash", ".gitignore")


class RunPaths(Value, frozen=True):
    """Where one run's files live (design section 3). Serves as the port's ``run`` too."""

    run_id: str
    state_root: Path
    artifact_root: Path

    def argument(self, environ: Mapping[str, str]) -> str:
        """The RUN argument that leads here from a shell: the id where that is enough, else the path."""
        if self.state_root == Path(os.path.realpath(lionagi_home(environ) / "runs" / self.run_id)):
            return self.run_id
        return words.command(self.state_root)

    @property
    def workspaces(self) -> Path:
        return self.state_root / "workspaces"

    @property
    def run_file(self) -> Path:
        return self.state_root / "workspaces.json"

    @property
    def git_dir(self) -> Path:
        return self.state_root / "git"

    @property
    def run_lock(self) -> Path:
        return self.workspaces / ".run.lock"

    def lease_file(self, worker_id: str) -> Path:
        return self.workspaces / f"{worker_id}.json"

    def lease_lock(self, worker_id: str) -> Path:
        # The worker ``run`` would share the run's own lock, and wait for itself.
        return self.workspaces / ("..run.lock" if fold(worker_id) == "run" else f".{worker_id}.lock")

    def saved_index(self, worker_id: str) -> Path:
        """The index as lionwt populated the worktree: what freeze compares with."""
        return self.git_dir / "lionwt" / f"{worker_id}.index"

    def artifacts(self, worker_id: str) -> Path:
        return self.artifact_root / worker_id

    def evidence(self, worker_id: str) -> Path:
        return self.artifact_root / ".lionwt" / worker_id

    def ref(self, path: Path) -> str:
        """``path`` relative to the artifact root, as records store it."""
        return str(path.relative_to(self.artifact_root))


def lionagi_home(environ: Mapping[str, str]) -> Path:
    """``$LIONAGI_HOME``, by default ``~/.lionagi``."""
    home = environ.get("LIONAGI_HOME")
    if home:
        return Path(os.path.abspath(os.path.expanduser(home)))
    return Path(os.path.expanduser("~")) / ".lionagi"


def run_paths(argument: str | None, environ: Mapping[str, str]) -> RunPaths:
    """Resolve a RUN argument: a run id, or the path of a run's state root.

    Without one, ``$LIONAGI_RUN_ID`` counts. Raises ``usage`` when there is
    neither, ``id_invalid`` and ``state_unreadable``.
    """
    value = argument or environ.get("LIONAGI_RUN_ID")
    if not value:
        raise LionwtError(
            "usage", "no RUN was given and LIONAGI_RUN_ID is not set; nothing was changed", hint="name the run"
        )
    if "/" in value or value in (".", ".."):
        state_root = Path(os.path.realpath(os.path.expanduser(value)))
        run_id = state_root.name
    else:
        run_id = value
        check_id(run_id, "run")
        state_root = lionagi_home(environ) / "runs" / run_id
    state_root = Path(os.path.realpath(state_root))
    manifest = _lionagi_manifest(state_root / "run.json")
    run_id = check_id(manifest.get("run_id") or run_id, "run")
    if manifest and state_root.name != run_id and "/" not in value:
        raise LionwtError(
            "state_unreadable",
            f"{state_root / 'run.json'} belongs to run {run_id!r}; nothing was changed",
            hint="name the run by the path of its state root",
        )
    artifact_root = Path(manifest.get("artifact_root") or state_root / "artifacts")
    if not artifact_root.is_absolute():
        artifact_root = state_root / artifact_root
    return RunPaths(run_id, state_root, Path(os.path.realpath(artifact_root)))


def _lionagi_manifest(path: Path) -> dict[str, str | None]:
    try:
        loaded = json.loads(_small_file(path))
    except FileNotFoundError:
        return {}
    except NotADirectoryError as error:
        above = next(parent for parent in path.parents if os.path.lexists(parent))
        raise LionwtError(
            "state_unreadable",
            f"{above} is no directory, so no run can lie in it; nothing was changed",
            hint="let LIONAGI_HOME, or the path of the run, name a directory, then run the same command again",
        ) from error
    except PermissionError as error:
        raise LionwtError(
            "permission",
            f"{path} may not be read: the run is another user's; nothing was changed",
            hint="run the command as the user who opened the run",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise LionwtError(
            "state_unreadable",
            f"{path} cannot be read ({error}); nothing was changed",
            hint="lionagi writes that file; look at it, then run the same command again",
        ) from error
    if not isinstance(loaded, dict) or not all(_is_plain(loaded.get(key)) for key in ("run_id", "artifact_root")):
        raise LionwtError(
            "state_unreadable",
            f"{path} is not a JSON object with run_id and artifact_root as text; nothing was changed",
            hint="lionagi writes that file; look at it, then run the same command again",
        )
    return cast("dict[str, str | None]", loaded)


def _small_file(path: Path) -> bytes:
    """The content of a regular file; a FIFO in its place must not be waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("it is not a regular file")
        return file.read(_LARGEST)


def _is_plain(value: object) -> bool:
    """Whether a value is missing, or text that a path can hold."""
    if value is None:
        return True
    try:
        return isinstance(value, str) and "\0" not in value and bool(os.fsencode(value) or True)
    except UnicodeEncodeError:
        return False

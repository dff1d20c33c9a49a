"""The only module that starts git.

A worker can write the repository's shared configuration, hooks, attributes and
refs, and plain git then runs the worker's programs as whoever called it. So
every child here gets an environment built from nothing, explicit directories
instead of discovery, bytes in and out, and a timeout.

There are three ways to stand in front of a repository:

- :func:`shared`: the repository's own directory, for refs and registrations
  only, with hooks, fsmonitor, signing and maintenance off;
- :func:`private`: the run's private git directory (:mod:`lionwt.snapshot`) over
  the shared objects, for all content work; nothing a worker configured exists
  there;
- :func:`operator`: discovery and configuration as the operator has them, before
  any worker of the run exists; only ever to read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Union

from lionwt import files, words
from lionwt.errors import OWNER, LionwtError
from lionwt.values import Value

#: Seconds for a command that looks at refs or names.
QUICK: Final = 60.0
#: Seconds for a command that reads or writes content.
CONTENT: Final = 1800.0
#: Seconds after which it is asked what a git might be waiting for.
PATIENCE: Final = 2.0
#: Seconds between asking a git to stop and killing it.
GRACE: Final = 5.0

#: A file system with less free space (bytes) is full.
FULL: Final = 1 << 20

MINIMUM: Final = (2, 38)

# Each entry answers a way in which an inherited environment or a worker's
# configuration makes git act elsewhere, wait for somebody, or run a program.
_CLOSED: Final[dict[str, str]] = {
    "LANG": "C",  # messages in one language; each locale file that is not read is time
    "LC_CTYPE": "C.UTF-8",  # for the operator's filter programs
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",  # refs/replace/<base> gives a false base tree
    "GIT_GRAFT_FILE": "/dev/null",  # info/grafts gives a commit false parents
    "GIT_ALLOW_PROTOCOL": "none",  # a missing object in a partial clone runs an ext:: remote
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "/bin/false",
    "SSH_ASKPASS": "/bin/false",
    "GIT_PAGER": "cat",
    "GIT_EDITOR": ":",
    "GIT_MERGE_AUTOEDIT": "no",
    "GIT_LITERAL_PATHSPECS": "1",
}

# A worker can write objects/info/commit-graph, which git believes before the commits themselves.
_ALWAYS: Final = tuple(
    flag
    for setting in (
        "core.fsync=all",
        "core.quotePath=false",
        "core.commitGraph=false",
        "advice.graftFileDeprecated=false",  # naming no graft file makes git speak of it
    )
    for flag in ("-c", setting)
)

_SHARED: Final = tuple(
    flag
    for setting in (
        "core.hooksPath=/dev/null",
        "core.fsmonitor=false",
        "core.alternateRefsCommand=false",
        "gc.auto=0",
        "maintenance.auto=false",
        "commit.gpgSign=false",
        "tag.gpgSign=false",
        "submodule.recurse=false",
        "log.showSignature=false",  # even a reflog listing would run gpg.program
        "worktree.guessRemote=false",
        "worktree.useRelativePaths=false",  # it would write an extension into the shared configuration
    )
    for flag in ("-c", setting)
)

#: A word of a command line; bytes for names that are no text.
Word = Union[str, bytes, "os.PathLike[str]"]

#: How git speaks of an object that it cannot read.
_BROKEN: Final = re.compile(
    r"is corrupt|inflate: |unable to unpack|object file .* is empty|unable to read [0-9a-f]{7}|bad object"
    r"|invalid object|missing (blob|tree|commit)"
)

#: How git says that it may not write into its own directory; what a worker's files forbid reads otherwise.
_FORBIDDEN: Final = re.compile(
    r"insufficient permission for adding|unable to create (temporary file|'.*'): (permission denied|read-only file)"
)

#: How git speaks of a configuration that it cannot use.
_CONFIG: Final = re.compile(r"bad (boolean |numeric )?config |reading the configuration files|abbrev length")

_OID = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?")


class Result(Value, frozen=True):
    """What a git child answered; ``out`` is empty where stdout went to a file.

    ``places`` are the directories it may have written to.
    """

    code: int
    out: bytes
    err: bytes
    places: tuple[str, ...] = ()


class Git(Value, frozen=True):
    """One way to stand in front of a repository."""

    env: Mapping[str, str]
    flags: tuple[str, ...] = ()
    cwd: str = "/"
    keep_fds: tuple[int, ...] = ()
    stop_fd: int | None = None

    def with_env(self, **env: str | os.PathLike[str]) -> Git:
        return self.having(env={**self.env, **{key: os.fspath(value) for key, value in env.items()}})

    def with_flags(self, *flags: str) -> Git:
        return self.having(flags=(*self.flags, *flags))

    def keeping(self, *fds: int) -> Git:
        """The same, whose children keep ``fds`` open and outlive a signal to lionwt's group."""
        return self.having(keep_fds=fds)

    def stopped_by(self, fd: int) -> Git:
        """The same, whose children are stopped when ``fd`` can be read, or its other end is closed."""
        return self.having(stop_fd=fd)

    def run(
        self,
        *arguments: Word,
        stdin: bytes | IO[bytes] | None = None,
        stdout: IO[bytes] | None = None,
        ok: Sequence[int] = (0,),
        timeout: float = QUICK,
    ) -> Result:
        """Run one git command to its end.

        Raises ``git_failed`` for an exit status not in ``ok``, ``git_timeout``
        when it had to be stopped, ``git_unsupported`` when there is no git.
        """
        command: list[str | bytes] = [
            _program(self.env["PATH"]),
            *_ALWAYS,
            *self.flags,
            *(os.fspath(word) for word in arguments),
        ]
        with contextlib.ExitStack() as files_of_it:
            errors = files_of_it.enter_context(_unnamed_file())
            printed = stdout or files_of_it.enter_context(_unnamed_file())
            if isinstance(stdin, bytes):
                given, stdin = stdin, files_of_it.enter_context(_unnamed_file())
                stdin.write(given)
                stdin.seek(0)
            try:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL if stdin is None else stdin,
                    stdout=printed,
                    stderr=errors,
                    env=self.env,
                    cwd=self.cwd,
                    pass_fds=self.keep_fds,
                    start_new_session=bool(self.keep_fds),
                )
            except (FileNotFoundError, NotADirectoryError) as error:  # PATH may name a file
                raise _missing(error, self.cwd) from error
            try:
                self._see_it_end(child, arguments, timeout)
            except BaseException as error:
                _stop(child)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise LionwtError(
                        "git_timeout",
                        f"git {_verb(arguments)} did not answer within {timeout:g} s and was stopped",
                        hint="a filter program may hang; look for it, then run the same command again",
                    ) from error
                raise
            out = b"" if stdout else _content(printed)
            err = _content(errors)[: 64 * 1024]
        result = Result(child.returncode, out, err, self._places())
        if result.code not in ok:
            raise failure(arguments, result)
        return result

    def _see_it_end(self, child: subprocess.Popen[bytes], arguments: Sequence[Word], timeout: float) -> None:
        """Wait until the child has ended; raises ``git_timeout`` early where a FIFO lies in its way."""
        try:
            _wait(child, min(timeout, PATIENCE), self.stop_fd)
        except subprocess.TimeoutExpired:
            found = None
            for place in dict.fromkeys(
                self.env.get(name) for name in ("GIT_DIR", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")
            ):
                # Hooks and submodules' own directories are nothing that git is asked about here.
                found = found or (files.special_below(Path(place), ("hooks", "lionwt", "modules")) if place else None)
            if found is None:
                _wait(child, max(timeout - PATIENCE, 0), self.stop_fd)
                return
            raise LionwtError(
                "git_timeout",
                f"git {_verb(arguments)} waited for {found}, which is no file, and was stopped",
                hint=f"remove it, then run the same command again: {words.command('rm', found)}",
            ) from None

    def _places(self) -> tuple[str, ...]:
        named = ("GIT_DIR", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_WORK_TREE")
        return tuple(self.env[name] for name in named if name in self.env)

    def line(self, *arguments: Word, **options: object) -> str:
        """The single line a command prints."""
        return text(self.run(*arguments, **options).out).rstrip("\n")  # type: ignore[arg-type]

    def oid(self, *arguments: Word, **options: object) -> str:
        """The object id a command prints; anything else is a failure."""
        out = self.run(*arguments, **options).out.strip()  # type: ignore[arg-type]
        if not _OID.fullmatch(out):
            raise LionwtError("git_failed", f"git {_verb(arguments)} printed no object id: {out[:80]!r}")
        return out.decode("ascii")


@functools.cache
def _program(path: str) -> str:
    """git's own path: a child would try every directory of PATH anew."""
    return shutil.which("git", path=path) or "git"


def _unnamed_file() -> IO[bytes]:
    """A file that nobody else sees.

    Not a pipe: a filter's leftover child may hold it open, and nobody waits for
    that; and a git whose reader was killed goes on to its end.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("git"), "w+b", buffering=0)
    import tempfile

    return tempfile.TemporaryFile(buffering=0)


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _wait(child: subprocess.Popen[bytes], timeout: float, stop_fd: int | None = None) -> None:
    """Wait for the child's end; raises ``TimeoutExpired``. On Linux without asking again and again."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(child.pid)
            try:
                ending = select.poll()
                ending.register(handle, select.POLLIN)
                if stop_fd is not None:
                    ending.register(stop_fd, select.POLLIN)
                seen = [fd for fd, _ in ending.poll(timeout * 1000)]
                timeout = GRACE if handle in seen else 0
            finally:
                os.close(handle)
    child.wait(timeout)


def text(raw: bytes) -> str:
    """Bytes from git as text, reversibly."""
    return os.fsdecode(raw)


def quoted(path: Path) -> str:
    """A path as git takes it whole in a list of object directories, whatever characters divide that list."""
    raw = os.fsencode(path)
    inner = re.sub(rb'["\\\x00-\x1f]', lambda found: b"\\%03o" % found[0][0], raw)
    return text(raw if inner == raw and b":" not in raw else b'"' + inner + b'"')


def records(raw: bytes) -> list[bytes]:
    """The entries of a NUL-terminated list."""
    return raw.split(b"\0")[:-1] if raw else []


def is_oid(value: str) -> bool:
    return bool(_OID.fullmatch(value.encode("ascii", "replace")))


def failure(arguments: Sequence[Word], result: Result) -> LionwtError:
    """The error of a git child that ended with an unexpected status."""
    lines = [line for line in text(result.err).splitlines() if not line.startswith("hint: ")]
    said = "\n".join(lines).strip()[-2000:] or f"exit status {result.code}"
    lowered = said.lower()
    if "no space left on device" in lowered or "disk quota exceeded" in lowered or _is_full(result.places):
        return LionwtError(
            "no_space", f"git {_verb(arguments)}: {said}", hint="free some space, then run the same command again"
        )
    code, hint = "git_failed", None
    if _FORBIDDEN.search(lowered):
        code, hint = "permission", OWNER
    elif _CONFIG.search(lowered):
        hint = "mend or remove what git names there, in an editor, then run the same command again"
    elif _BROKEN.search(lowered):
        hint = (
            "an object of the repository is broken or missing (after a loss of power the last ones may be): move the "
            "file that is named away, or fetch the object from a clone, then run the same command again; "
            f"what is broken says: {words.command('git', '-C', result.places[1] if result.places[1:] else '.', 'fsck')}"
        )
    return LionwtError(
        code,
        f"git {_verb(arguments)} failed: {said}",
        hint=hint,
        diagnostics={"status": result.code, "stderr": said},
    )


def _is_full(places: Iterable[str]) -> bool:
    """Whether a file system is full: git often says only that it was unable to write."""
    for place in places:
        try:
            seen = os.statvfs(place)
        except OSError:
            continue
        if seen.f_bavail * seen.f_frsize < FULL or (seen.f_files and not seen.f_favail):
            return True
    return False


def _verb(arguments: Sequence[Word]) -> str:
    return os.fsdecode(arguments[0])


def _missing(error: OSError, cwd: str) -> LionwtError:
    if not os.path.isdir(cwd):
        return LionwtError("repository_moved", f"{cwd} is not there; nothing was changed")
    return LionwtError(
        "git_unsupported", f"git was not found ({error})", hint="install git 2.38 or newer and put it on PATH"
    )


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a child the gentle way first: a killed git leaves its lock files."""
    child.send_signal(signal.SIGTERM)
    try:
        _wait(child, GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@functools.cache
def _safe_path(path: str) -> str:
    """PATH without what is relative or empty: a child stands in the worktree, where such a name is the worker's."""
    return os.pathsep.join(entry for entry in path.split(os.pathsep) if os.path.isabs(entry)) or os.defpath


def _base_env() -> dict[str, str]:
    return {
        "PATH": _safe_path(os.environ.get("PATH", os.defpath)),
        # Filter programs of the operator may need it; git itself reads nothing there.
        "HOME": os.environ.get("HOME", "/"),
        **_CLOSED,
    }


def shared(common_dir: str, *, git_dir: str | None = None, work_tree: str | None = None) -> Git:
    """The repository's own directory: refs and registrations only.

    ``git_dir`` is a worktree's own directory when its HEAD matters. The common
    directory is named explicitly, since a worker can edit the file that names it.
    """
    env = {**_base_env(), "GIT_DIR": git_dir or common_dir, "GIT_COMMON_DIR": common_dir}
    # A work tree is always named: core.worktree in the shared config leads elsewhere.
    env["GIT_WORK_TREE"] = work_tree or common_dir
    return Git(env=env, flags=_SHARED)


def private(
    git_dir: str | os.PathLike[str],
    common_dir: str | os.PathLike[str],
    *,
    work_tree: str | os.PathLike[str] | None = None,
    index: str | os.PathLike[str] | None = None,
) -> Git:
    """The run's private directory over the shared objects: all content work."""
    env = {
        **_base_env(),
        "GIT_DIR": os.fspath(git_dir),
        "GIT_OBJECT_DIRECTORY": os.path.join(os.fspath(common_dir), "objects"),
        # Without one git would take the current directory for the work tree.
        "GIT_WORK_TREE": os.fspath(work_tree or git_dir),
    }
    if index is not None:
        env["GIT_INDEX_FILE"] = os.fspath(index)
    return Git(env=env, cwd=os.fspath(work_tree or git_dir))


def operator(cwd: str | os.PathLike[str]) -> Git:
    """Discovery and configuration as the operator has them; only to read."""
    env = {**_base_env(), "GIT_CEILING_DIRECTORIES": ""}
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_NOSYSTEM"):
        del env[name]
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM", "XDG_CONFIG_HOME"):
        if name in os.environ:
            env[name] = os.environ[name]
    return Git(env=env, cwd=os.fspath(cwd))


def check_version() -> None:
    """Raise ``git_unsupported`` for a git older than 2.38."""
    said = Git(env=_base_env()).line("version")
    found = re.search(r"(\d+)\.(\d+)", said)
    if not found or (int(found[1]), int(found[2])) < MINIMUM:
        raise LionwtError(
            "git_unsupported",
            f"{said!r} is too old: lionwt needs git {MINIMUM[0]}.{MINIMUM[1]} or newer; nothing was changed",
            hint="install a newer git and put it first on PATH",
        )


def update_refs(git: Git, commands: Iterable[bytes]) -> Result:
    """Run one ref transaction; every line is a command of ``update-ref --stdin -z``."""
    script = b"start\0" + b"".join(commands) + b"prepare\0commit\0"
    return git.run("update-ref", "--no-deref", "--stdin", "-z", stdin=script, ok=(0, 128))

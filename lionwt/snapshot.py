"""The run's private git directory: the operator's settings, taken before any worker exists.

Content work (populate, capture, merge, checkout update) runs in a bare git
directory of lionwt's own over the shared objects (design section 6). Its
configuration is written once, when the run is opened, from the operator's
system and global scope; from the repository's own configuration come only
settings that name no program. So whatever a worker writes into the shared
configuration afterwards does not exist here.

gc must never run in it: to git this directory has no refs, so everything in
the shared store would look unreachable.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lionwt import files, git, mounts, store, words
from lionwt.errors import LionwtError
from lionwt.repository import Repository
from lionwt.values import Value

_OPERATOR_SCOPES = ("system", "global", "command")
_NO_IDENTITY = "".join(map(chr, range(33))) + ".,:;<>\"\\'"  # what git strips from the ends of an identity
_FILTER_PROGRAMS = ("clean", "smudge", "process")
_WORD = re.compile(r"""[^\s'"`;|&()<>=]+""")  # what sh could take for a path


class OperatorConfig(Value, frozen=True):
    """``$LIONAGI_HOME/lionwt.toml``: what the operator adds."""

    protected_branches: tuple[str, ...] = ()
    trusted_filters: tuple[str, ...] = ()


def read_operator_config(home: Path) -> OperatorConfig:
    """Read ``lionwt.toml``; raises ``config_invalid``. A missing file adds nothing."""
    path = home / "lionwt.toml"
    try:
        content = path.read_text("utf-8")
    except FileNotFoundError:
        return OperatorConfig()
    except (OSError, UnicodeDecodeError) as error:
        raise LionwtError("config_invalid", f"{path} cannot be read: {error}; nothing was changed") from error
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        loaded = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise LionwtError("config_invalid", f"{path}: {error}; nothing was changed") from error
    known = ("protected_branches", "trusted_filters")
    for key, value in loaded.items():
        strings = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
        if key not in known or not strings:
            raise LionwtError(
                "config_invalid",
                f"{path}: {key!r} is not a list of strings that lionwt knows; nothing was changed",
                hint="it may hold: " + ", ".join(f"{name} = [...]" for name in known),
            )
    return OperatorConfig(tuple(loaded.get("protected_branches", ())), tuple(loaded.get("trusted_filters", ())))


class Settings(Value, frozen=True):
    """The settings that content work may use."""

    filters: Mapping[tuple[str, str], str]
    conversion: Mapping[str, str]
    attributes: bytes
    user_name: str | None
    user_email: str | None
    default_branch: str | None


def read_settings(repository: Repository, trusted_filters: Sequence[str]) -> Settings:
    """Take the snapshot; raises ``filter_untrusted``.

    A filter that only the repository's own configuration names may have been
    written there by an earlier worker, so it counts only if the operator lists
    it in ``lionwt.toml``.
    """
    listed = git.operator(repository.checkout).run("config", "--list", "-z", "--show-scope")
    fields = git.records(listed.out)
    own: dict[str, str] = {}
    local: dict[str, str] = {}
    for scope, entry in zip(fields[::2], fields[1::2], strict=True):
        key, separator, value = entry.partition(b"\n")
        (own if git.text(scope) in _OPERATOR_SCOPES else local)[git.text(key)] = (
            git.text(value) if separator else "true"
        )
    merged = {**own, **local}
    attributes = merged.get("core.attributesfile")
    return Settings(
        filters=_filters(own, local, trusted_filters),
        conversion={
            key: merged[key] for key in ("core.autocrlf", "core.eol", "core.sharedrepository") if key in merged
        },
        attributes=_attributes(attributes, repository.checkout),
        user_name=_identity(merged.get("user.name", "")),
        user_email=_identity(merged.get("user.email", "")),
        default_branch=own.get("init.defaultbranch"),
    )


def _identity(value: str) -> str | None:
    """A name or address as git takes it; None where git would find nothing in it and refuse to commit."""
    return value if value.strip(_NO_IDENTITY) else None


def _filters(own: Mapping[str, str], local: Mapping[str, str], trusted: Sequence[str]) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for source, is_own in ((own, True), (local, False)):
        for key, value in source.items():
            parts = key.split(".")
            if parts[0] != "filter" or len(parts) < 3:
                continue
            driver, setting = ".".join(parts[1:-1]), parts[-1]
            if is_own or driver in trusted:
                found[driver, setting] = value
            elif setting in _FILTER_PROGRAMS and (driver, setting) not in found and value:
                raise LionwtError(
                    "filter_untrusted",
                    f"the filter {driver!r} ({setting}) is defined by the repository's own configuration only, "
                    "which a worker can write; nothing was made",
                    hint=f'if it is yours, add trusted_filters = ["{driver}"] to $LIONAGI_HOME/lionwt.toml, '
                    "or define it in your global git configuration",
                )
    return found


def require_filters_outside(settings: Settings, common_dir: Path, base: str) -> None:
    """Raise ``filter_untrusted`` for a filter whose program lies in the worktree.

    Filters run there, so a relative path, or a script that the base holds,
    is whatever the worker made of it.
    """
    for (driver, setting), command in settings.filters.items():
        inside = _inside(command, common_dir, base) if setting in _FILTER_PROGRAMS else None
        if inside is not None:
            raise LionwtError(
                "filter_untrusted",
                f"the filter {driver!r} ({setting}) runs {inside!r} from the worktree, where a worker can change it; "
                "nothing was made",
                hint="make the path absolute, outside of the repository: "
                + words.command("git", "config", f"filter.{driver}.{setting}", "..."),
            )


def _inside(command: str, common_dir: Path, base: str) -> str | None:
    """The word of a filter's command that names a program in the worktree."""
    words: list[str] = _WORD.findall(command)
    if not words or os.path.basename(words[0]) == "git-lfs":  # its words are its own, whatever the base holds
        return None
    if "/" in words[0] and words[0][0] not in "/~$":
        return words[0]
    named = {os.path.normpath(word): word for word in words if "/" in word or word != words[0]}
    asked = [path for path in named if not path.startswith(("/", "..", "~", "$")) and path != "."]
    if not asked:
        return None
    listed = git.shared(str(common_dir)).run("ls-tree", "-z", "--full-tree", base, "--", *asked)
    for row in git.records(listed.out):
        meta, _, path = row.partition(b"\t")
        if meta.split(b" ")[1] == b"blob":
            return named[git.text(path)]
    return None


def _attributes(configured: str | None, checkout: Path) -> bytes:
    if configured:
        path = Path(os.path.expanduser(configured))
        path = path if path.is_absolute() else checkout / path
    else:
        home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
        path = Path(home) / "git" / "attributes"
    try:
        return files.read_small(path, follow=True)
    except OSError:
        return b""


def make_private_git_dir(where: Path, repository: Repository, settings: Settings) -> None:
    """Make the private git directory at ``where``, whole or not at all."""
    building = where.parent / f".git.{os.urandom(8).hex()}.tmp"
    try:
        for sub in ("objects", "refs", "info", "lionwt"):
            store.make_private_dir(building / sub)
        (building / "HEAD").write_bytes(b"ref: refs/heads/none\n")
        (building / "attributes").write_bytes(settings.attributes)
        for name, shared_name in (("info/attributes", "info/attributes"), ("shallow", "shallow")):
            source = repository.common_dir / shared_name
            if source.is_file():
                (building / name).write_bytes(files.read_small(source, follow=True))
        (building / "config").write_text(
            _config(where, repository, settings), encoding="utf-8", errors="surrogateescape"
        )
        for parent, _, made in os.walk(building):
            for name in made:
                os.chmod(os.path.join(parent, name), 0o600)
                store.sync_file(Path(parent, name))
            store.sync_dir(Path(parent))
        if where.exists():  # an opening that died before the run's file was written
            mounts.remove_tree(where)
        os.rename(building, where)
    except BaseException:
        with contextlib.suppress(OSError):
            mounts.remove_tree(building)
        raise
    store.sync_dir(where.parent)


def _config(where: Path, repository: Repository, settings: Settings) -> str:
    sha256 = repository.object_format == "sha256"
    core = {
        "repositoryformatversion": "1" if sha256 else "0",
        "bare": "true",
        "filemode": "true",  # core.fileMode=false in the repository loses executable bits
        "trustctime": "true",  # otherwise an edit with a restored mtime is not seen
        "checkstat": "default",
        "logallrefupdates": "false",
        "hookspath": "/dev/null",
        "fsmonitor": "false",
        "untrackedcache": "false",
        "splitindex": "false",
        "sparsecheckout": "false",
        "attributesfile": str(where / "attributes"),
        **{key.partition(".")[2]: value for key, value in settings.conversion.items()},
    }
    sections: list[tuple[str, str | None, Mapping[str, str]]] = [("core", None, core)]
    if sha256:
        sections.append(("extensions", None, {"objectformat": "sha256"}))
    sections += [
        ("index", None, {"sparse": "false", "version": "2"}),
        ("gc", None, {"auto": "0", "pruneExpire": "never", "reflogExpire": "never"}),
        ("maintenance", None, {"auto": "false"}),
        ("lfs", None, {"storage": str(repository.common_dir / "lfs")}),
    ]
    drivers: dict[str, dict[str, str]] = {}
    for (driver, setting), value in settings.filters.items():
        drivers.setdefault(driver, {})[setting] = value
    sections += [("filter", driver, values) for driver, values in drivers.items()]
    lines = []
    for section, sub, values in sections:
        lines.append(f"[{section}]" if sub is None else f'[{section} "{_escaped(sub)}"]')
        lines += [f'\t{key} = "{_escaped(value)}"' for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

"""A hermetic world for every test: own HOME, own LIONAGI_HOME, own git configuration.

Tests drive the installed ``lionwt`` command in real processes on real
repositories. :class:`World` runs it and makes repositories; :class:`Repo` is
the operator's checkout.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

#: The installed command, beside the interpreter that runs the tests.
LIONWT = str(Path(sys.executable).parent / "lionwt")
Runner = Any  # pytest-console-scripts' ScriptRunner


def pytest_configure() -> None:
    """What every process that tests start finds: compiled modules, and no signal ignored (as under nohup)."""
    import compileall

    import lionwt

    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)
    compileall.compile_dir(Path(lionwt.__file__).parent, quiet=2)


@dataclass
class Answer:
    """What one call of ``lionwt`` answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        lines = self.out.splitlines()
        assert len(lines) == 1, f"not exactly one line on stdout: {self.out!r} {self.err!r}"
        loaded = json.loads(lines[0])
        assert isinstance(loaded, dict)
        assert loaded["exit_code"] == self.code, self
        assert loaded["ok"] == (self.code == 0), self
        return loaded

    @property
    def error(self) -> str | None:
        """The error code of the JSON answer."""
        error = self.json["error"]
        return None if error is None else str(error["code"])


class Repo:
    """A real repository, seen from one of its worktrees."""

    def __init__(self, path: Path, env: dict[str, str]) -> None:
        self.path = path
        self.env = env

    def git(self, *arguments: str | os.PathLike[str], check: bool = True, **options: Any) -> str:
        """Run git as the operator in this checkout; returns stdout without its last newline."""
        done = self.run_git(*arguments, check=check, **options)
        return done.stdout.decode("utf-8", "surrogateescape").removesuffix("\n")

    def run_git(
        self, *arguments: str | os.PathLike[str], check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[bytes]:
        options.setdefault("cwd", self.path)
        options.setdefault("env", self.env)
        done = subprocess.run(["git", *map(os.fspath, arguments)], capture_output=True, check=False, **options)
        if check and done.returncode:
            raise AssertionError(f"git {arguments} failed: {done.stderr.decode(errors='replace')}")
        return done

    def write(self, name: str, content: str | bytes = "") -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def commit(self, message: str = "change", **files: str) -> str:
        """Write ``files``, commit everything, return the new commit."""
        for name, content in files.items():
            self.write(name, content)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.head()

    def head(self, ref: str = "HEAD") -> str:
        return self.git("rev-parse", "--verify", ref)

    def status(self) -> str:
        return self.git("status", "--porcelain", "--untracked-files=all")

    def merges(self, ref: str = "work") -> list[str]:
        """The merges on a branch's own line, the newest first."""
        return self.git("rev-list", "--first-parent", "--merges", ref).split()

    def parents(self, commit: str) -> list[str]:
        return self.git("rev-list", "--parents", "-1", commit).split()[1:]

    def refs(self) -> str:
        return self.git("for-each-ref", "--format=%(refname) %(objectname) %(symref)")

    def untouched(self) -> dict[str, tuple[Any, ...]]:
        """:meth:`snapshot` without lionwt's own refs: what no completion but a landing may change."""
        own = ("lionwt", os.path.join("heads", "lionagi"))
        return {
            name: seen
            for name, seen in self.snapshot().items()
            if not name.removeprefix(".git/").removeprefix("logs/").removeprefix("refs/").startswith(own)
        }

    def snapshot(self) -> dict[str, tuple[Any, ...]]:
        """Every file of the checkout and of its git directory that a refusal may not change.

        Object files, logs of objects and lionwt's own lock files are left out:
        they say nothing about what the operator sees.
        """
        found: dict[str, tuple[Any, ...]] = {}
        for parent, directories, files in os.walk(self.path):
            relative = os.path.relpath(parent, self.path)
            if relative == "." and ".worktrees" in directories:
                directories.remove(".worktrees")
            if relative == ".git":
                for name in ("objects", "lionwt", "worktrees"):
                    if name in directories:
                        directories.remove(name)
            for name in files:
                path = os.path.join(parent, name)
                seen = os.lstat(path)
                content: Any = os.readlink(path) if os.path.islink(path) else Path(path).read_bytes()
                if relative == ".git" and name == "index":
                    content = self.git("ls-files", "-s", "-v")
                found[os.path.join(relative, name)] = (seen.st_mode, content)
        return found


def files_of(root: Path) -> dict[bytes, tuple[str, bytes]]:
    """Every file below ``root`` by name, with the mode git gives it and its bytes; not the top ``.git``."""
    found: dict[bytes, tuple[str, bytes]] = {}
    top = os.fsencode(root)
    for parent, directories, files in os.walk(top):
        if parent == top and b".git" in directories:
            directories.remove(b".git")
        links = [name for name in directories if os.path.islink(os.path.join(parent, name))]
        for name in [*files, *links]:
            path = os.path.join(parent, name)
            relative = os.path.relpath(path, top)
            seen = os.lstat(path)
            if stat.S_ISLNK(seen.st_mode):
                found[relative] = ("120000", os.readlink(path))
            elif stat.S_ISREG(seen.st_mode):
                if relative != b".git":
                    mode = "100755" if seen.st_mode & 0o100 else "100644"
                    found[relative] = (mode, Path(os.fsdecode(path)).read_bytes())
            else:
                found[relative] = ("special", b"")
    return found


class World:
    """One test's machine: a home, repositories, and the command."""

    def __init__(self, root: Path, runner: Runner) -> None:
        self.root = root
        self.runner = runner
        self.children: list[subprocess.Popen[str]] = []
        self.home = root / "home"
        self.lionagi_home = root / "lionagi"
        self.home.mkdir()
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "LIONAGI_HOME": str(self.lionagi_home),
            "GIT_CONFIG_NOSYSTEM": "1",
            "TMPDIR": str(root),
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        #: What only the git that tests call sees, not lionwt.
        self.git_env: dict[str, str] = {}
        (self.home / ".gitconfig").write_text(
            "[user]\n\tname = Operator\n\temail = operator@example.invalid\n"
            "[init]\n\tdefaultBranch = main\n[advice]\n\tdetachedHead = false\n"
            '[protocol "file"]\n\tallow = always\n'
        )

    def lionwt(
        self,
        *arguments: str | os.PathLike[str],
        cwd: Path | None = None,
        env: dict[str, str | None] | None = None,
        stdin: str | None = None,
        wrapper: Sequence[str] = (),
    ) -> Answer:
        """Run the command to its end in ``cwd`` (default: the first repository), under ``wrapper`` if given."""
        import io

        result = self.runner.run(
            [*wrapper, LIONWT, *map(os.fspath, arguments)],
            cwd=str(cwd or (self.root / "repo" if (self.root / "repo").exists() else self.root)),
            env=self.environment(env),
            stdin=io.StringIO(stdin) if stdin is not None else None,
        )
        return Answer(result.returncode, result.stdout, result.stderr)

    def popen(
        self,
        *arguments: str | os.PathLike[str],
        cwd: Path | None = None,
        env: dict[str, str | None] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start the command without waiting; for races and faults."""
        child = subprocess.Popen(
            [LIONWT, *map(os.fspath, arguments)],
            cwd=cwd or self.root / "repo",
            env=self.environment(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        self.children.append(child)
        return child

    def stopped_at(self, point: str, *arguments: str) -> subprocess.Popen[str]:
        """Start the command and wait until it stands still at a fault point."""
        child = self.popen(*arguments, env={"LIONWT_FAULT": f"{point}:stop:1"})
        wait_until(lambda: is_stopped(child.pid) or child.poll() is not None, 60)
        assert child.poll() is None, f"{point} was never passed: {child.communicate()}"
        return child

    def end(self) -> None:
        """End what a test started and did not wait for."""
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.communicate(timeout=30)

    def leftovers(self, run: str, repo: Repo) -> list[str]:
        """What lionwt leaves behind only while a lease of the run is not terminal."""
        git_dir = repo.path / ".git"
        found = [
            *git_dir.glob("index.lock"),
            *git_dir.glob("lionwt-*"),
            *(self.state(run) / "git" / "lionwt").iterdir(),
        ]
        found += [path for path in (git_dir / "lionwt").iterdir() if path.suffix != ".lock"]
        found += [path for path in (repo.path / ".worktrees", git_dir / "worktrees") if path.exists()]
        refs = repo.git("for-each-ref", "--format=%(refname)", "refs/lionwt", "refs/heads/lionagi").split()
        return [*map(str, found), *refs]

    @contextlib.contextmanager
    def stopped(
        self, point: str, *arguments: str | os.PathLike[str], cwd: Path | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """The command standing still at the fault point ``point``; ended afterwards, whatever happens.

        ``child.send_signal(signal.SIGCONT)`` lets it go on.
        """
        child = self.popen(*arguments, cwd=cwd, env={"LIONWT_FAULT": f"{point}:stop"})
        try:
            wait_until(lambda: child.poll() is not None or psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
            assert child.poll() is None, child.communicate()
            yield child
        finally:
            if child.poll() is None:
                child.kill()
            child.communicate()

    def typed(self, command: str, *, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Type what a hint says into a shell, as the operator, in a directory of its own that must stay empty."""
        where = self.root / "shell"
        where.mkdir(exist_ok=True)
        done = subprocess.run(
            ["sh", "-c", os.fsencode(command)],
            cwd=where,
            env=self.environment({"PATH": f"{Path(LIONWT).parent}:{self.env['PATH']}"}),
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert list(where.iterdir()) == [], command
        assert not check or done.returncode == 0, (command, done)
        return done

    def environment(self, extra: dict[str, str | None] | None = None) -> dict[str, str]:
        merged: dict[str, str | None] = {**self.env, **(extra or {})}
        return {key: value for key, value in merged.items() if value is not None}

    def git_environment(self) -> dict[str, str]:
        """The environment of the git that tests call: nothing that a test makes lionwt inherit."""
        own = {key: value for key, value in self.env.items() if not key.startswith(("GIT_", "LC_"))}
        return {**own, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C.UTF-8", **self.git_env}

    def config(self, key: str, value: str) -> None:
        """Set an entry of the operator's global git configuration."""
        subprocess.run(["git", "config", "--global", key, value], check=True, env=self.git_environment())

    def repo(self, name: str = "repo", *, branch: str = "work", object_format: str = "sha1") -> Repo:
        """A repository with three files, ``main`` behind, and ``branch`` checked out."""
        path = self.root / name
        path.mkdir(parents=True)
        repo = Repo(path, self.git_environment())
        repo.git("init", "-q", "-b", "main", f"--object-format={object_format}")
        for number in range(1, 4):
            repo.write(f"f{number}.txt", "".join(f"line {line} of {number}\n" for line in range(20)))
        repo.write("sub/dir/deep.txt", "deep\n")
        repo.write(".gitignore", "*.log\nignored/\n")
        repo.commit("base")
        if branch != "main":
            repo.git("switch", "-q", "-c", branch)
        return repo

    def lease(self, run: str, *workers: str, start: bool = True, **options: Any) -> dict[str, Repo]:
        """Lease (and start) workers, each as a :class:`Repo` in its worktree.

        ``options``: ``target`` (work), ``policy`` (merge_validated), ``args`` (more arguments).
        """
        arguments = ["lease", run, "--json", "--owner-pid", "none"]
        for worker in workers:
            arguments += ["-w", worker]
        if not (self.state(run) / "workspaces.json").exists():
            arguments += ["--target", options.get("target", "work")]
            arguments += ["--policy", options.get("policy", "merge_validated")]
        answer = self.lionwt(*arguments, *options.get("args", ()), cwd=options.get("cwd"))
        assert answer.code == 0, answer
        found = {}
        for lease in answer.json["leases"]:
            found[lease["worker_id"]] = Repo(Path(lease["worktree_path"]), self.git_environment())
            if start:
                self.start_now(lease)
        return found

    def start_now(self, lease: dict[str, Any]) -> None:
        """Start a worker through the port, in this process: what a set-up needs often and quickly."""
        import lionwt

        with self._environ():
            asyncio.run(lionwt.WorktreeCoordinator().mark_running(lionwt.WorkerWorktreeLease.model_validate(lease)))

    def freeze_now(self, run: str, worker: str, *arguments: str) -> None:
        """Freeze a worker through the port, in this process; ``arguments`` as on the command line."""
        import lionwt
        from lionwt import parsing, records

        typed = [parsing.validation(arg) for arg in arguments if not arg.startswith("--")]
        validations = tuple(lionwt.ValidationResult.model_validate(records.plain(result)) for result in typed)
        lease = lionwt.WorkerWorktreeLease.model_validate(self.lease_file(run, worker)["lease"])
        with self._environ():
            asyncio.run(
                lionwt.WorktreeCoordinator().freeze(
                    lease,
                    worker_succeeded=not {"--failed", "--cancelled"} & set(arguments),
                    cancelled="--cancelled" in arguments,
                    validations=validations,
                )
            )

    @contextlib.contextmanager
    def _environ(self) -> Iterator[None]:
        """This process in the test's environment."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.env.items():
                patch.setenv(name, value)
            yield

    def freeze(self, run: str, worker: str, *arguments: str) -> Answer:
        """Freeze as succeeded, unless ``arguments`` say otherwise."""
        verdict = () if {"--failed", "--cancelled", "--succeeded"} & set(arguments) else ("--succeeded",)
        return self.lionwt("freeze", run, worker, "--json", *verdict, *arguments)

    def frozen(self, run: str, workers: dict[str, dict[str, str]], *arguments: str, **options: Any) -> dict[str, Repo]:
        """Lease, start and freeze workers that each wrote the given files; ``arguments`` go to freeze."""
        leased = self.lease(run, *workers, **options)
        for worker, files in workers.items():
            for name, content in files.items():
                leased[worker].write(name, content)
            self.freeze_now(run, worker, *arguments)
        return leased

    def promote(self, run: str, *arguments: str, **options: Any) -> Answer:
        return self.lionwt("promote", run, "--json", *arguments, **options)

    def state(self, run: str) -> Path:
        return self.lionagi_home / "runs" / run

    def lease_file(self, run: str, worker: str) -> dict[str, Any]:
        loaded = json.loads((self.state(run) / "workspaces" / f"{worker}.json").read_bytes())
        assert isinstance(loaded, dict)
        return loaded

    def state_bytes(self, run: str) -> dict[str, bytes]:
        """Every lease file of a run, and the run's own, as they lie on disk."""
        files = [*sorted((self.state(run) / "workspaces").glob("*.json")), self.state(run) / "workspaces.json"]
        return {path.name: path.read_bytes() for path in files}

    def record(self, run: str, worker: str) -> dict[str, Any]:
        record = self.lease_file(run, worker)["record"]
        assert isinstance(record, dict), f"no record of {worker} yet"
        return record

    def evidence(self, run: str, worker: str) -> Path:
        return self.state(run) / "artifacts" / ".lionwt" / worker

    def settle_index(self, run: str, worker: str) -> None:
        """Let the index of a lease be clearly younger than its files, as it is where a lease takes its time.

        What is edited afterwards is edited in a later second, since git compares times in seconds.
        """
        index = self.state(run) / "git" / "lionwt" / f"{worker}.index"
        seen = index.stat()
        wait_until(lambda: int(time.time()) > int(seen.st_mtime), 5)
        os.utime(index, ns=(seen.st_atime_ns, seen.st_mtime_ns + 5_000_000_000))

    def lease_bytes(self, run: str, worker: str) -> bytes:
        return (self.state(run) / "workspaces" / f"{worker}.json").read_bytes()

    def standing(self, run: str, worker: str) -> dict[str, Any]:
        """All that a freeze may not change: the worker's files and index, its HEAD and logs, every ref.

        Read without git, so that looking changes and runs nothing.
        """
        file = self.lease_file(run, worker)
        root, admin = Path(file["lease"]["worktree_path"]), Path(file["identity"]["admin_dir"])
        common = admin.parent.parent
        found: dict[str, Any] = {}
        for name, top in (("files", root), ("admin", admin), ("refs", common / "refs"), ("logs", common / "logs")):
            for parent, directories, files in os.walk(top):
                if name == "refs" and "lionwt" in directories:
                    directories.remove("lionwt")
                for entry in [*directories, *files]:
                    path = Path(parent, entry)
                    seen = path.lstat()
                    content = path.read_bytes() if stat.S_ISREG(seen.st_mode) else b""
                    times = (seen.st_mtime_ns, seen.st_ino) if name in ("files", "admin") else ()
                    key = f"{name}:{path.relative_to(top)}"
                    found[key] = (seen.st_mode, *times, hashlib.sha256(content).hexdigest())
        for name in ("packed-refs", "config", "HEAD", "index"):
            path = common / name
            found[name] = path.read_bytes() if path.exists() else None
        return found

    def applied(self, run: str, worker: str, name: str = "applied") -> Repo:
        """A clean checkout of the base with the candidate's patch applied by plain git."""
        base = self.lease_file(run, worker)["lease"]["base_sha"]
        patch = self.evidence(run, worker) / "candidate.patch"
        path = self.root / f"{name}-{worker}"
        clean = Repo(path, self.environment())
        path.mkdir()
        # Only the base's own objects: git would take what the patch lacks from the store otherwise.
        clean.git("init", "-q", f"--object-format={'sha256' if len(base) == 64 else 'sha1'}")
        clean.git("fetch", "-q", self.root / "repo", base)
        clean.git("checkout", "-q", "--detach", base)
        if patch.stat().st_size:
            clean.git("apply", "--index", "--binary", "--whitespace=nowarn", patch)
        return clean

    def round_trip(self, run: str, worker: str, *, without: tuple[bytes, ...] = ()) -> dict[bytes, tuple[str, bytes]]:
        """Prove that the patch makes the base into exactly what the worker left; returns its files.

        ``without`` names what the manifest says is not in the tree.
        """
        candidate = self.lease_file(run, worker)["candidate"]
        content = (self.evidence(run, worker) / "candidate.patch").read_bytes()
        assert hashlib.sha256(content).hexdigest() == candidate["patch_sha256"]
        clean = self.applied(run, worker)
        wanted = files_of(Path(candidate["lease"]["worktree_path"]))
        for entry in without:
            del wanted[entry]
        found = files_of(clean.path)
        assert {name: found.get(name) for name in {*found, *wanted} if found.get(name) != wanted.get(name)} == {}
        assert clean.git("write-tree") == self.manifest(run, worker)["tree"]
        changed = clean.run_git("diff", "--cached", "--no-renames", "--name-only", "-z", "HEAD", "--").stdout
        assert list(candidate["files_changed"]) == [os.fsdecode(row) for row in changed.split(b"\0")[:-1]]
        return found

    def saved(self, run: str, worker: str) -> dict[str, tuple[int, bytes]]:
        """The files kept raw in ``saved.tar``: mode and bytes."""
        import tarfile

        found = {}
        with tarfile.open(self.evidence(run, worker) / "saved.tar", encoding="utf-8") as tar:
            for member in tar.getmembers():
                opened = tar.extractfile(member) if member.isreg() else None
                found[member.name] = (member.mode, opened.read() if opened else os.fsencode(member.linkname))
        return found

    def manifest(self, run: str, worker: str) -> dict[str, Any]:
        loaded = json.loads((self.evidence(run, worker) / "manifest.json").read_bytes())
        assert isinstance(loaded, dict)
        return loaded


def whole_life(world: World, repo: Repo, *, target: str = "work", cwd: Path | None = None, run: str = "r1") -> None:
    """Two workers of ``repo`` from lease to landing; asserts on git that all of it went right.

    ``repo`` is the checkout on ``target``; it holds the files of :meth:`World.repo`.
    The first worker commits, the second leaves its work uncommitted.
    """
    base = repo.head(f"refs/heads/{target}")
    worktrees = repo.git("worktree", "list", "--porcelain", "-z")
    # What is there already (what the kind of repository says as "dirty") must stay as it is.
    status = repo.status()
    one, two = world.lease(run, "w1", "w2", target=target, cwd=cwd or repo.path).values()
    for worker in (one, two):
        assert worker.head() == base
        assert worker.status() == ""
        assert (worker.path / "sub/dir/deep.txt").read_text() == "deep\n"
    assert repo.status() == status
    one.commit("worker", **{"f1.txt": "one\n", "new/é.bin": "\0one"})
    two.git("rm", "-q", "--sparse", "f2.txt")
    two.write("sub/dir/deep.txt", "deeper\n")
    two.write("tool", "#!/bin/sh\n").chmod(0o755)
    assert world.freeze(run, "w1").code == 0
    assert world.freeze(run, "w2").code == 0
    answer = world.promote(run)
    assert answer.code == 0, answer
    first, second = answer.json["records"]
    assert (first["status"], second["status"]) == ("promoted", "promoted")
    # The target: two merges, each of the head before it and of a candidate, and exactly that tree.
    assert repo.head(f"refs/heads/{target}") == second["promoted_commit"]
    assert repo.head(f"{second['promoted_commit']}^1") == first["promoted_commit"]
    assert repo.head(f"{first['promoted_commit']}^1") == base
    assert repo.git("rev-list", "--count", "--merges", f"{base}..{target}") == "2"
    changes = repo.git("-c", "core.quotePath=false", "diff-tree", "-r", "--no-renames", "--name-status", base, target)
    assert changes.split() == ["M", "f1.txt", "D", "f2.txt", "A", "new/é.bin", "M", "sub/dir/deep.txt", "A", "tool"]
    assert repo.git("show", f"{target}:sub/dir/deep.txt") == "deeper"
    assert repo.git("ls-tree", target, "tool").startswith("100755 ")
    # The operator's checkout follows.
    assert repo.status() == status
    if skipped := {line for line in repo.git("ls-files", "-t").splitlines() if line.startswith("S ")}:
        # A sparse checkout stays as sparse as git would have it: nothing appears, nothing is unmarked.
        present = [line for line in skipped if os.path.lexists(repo.path / line[2:])]
        assert present == []
        repo.git("sparse-checkout", "reapply")
        assert {line for line in repo.git("ls-files", "-t").splitlines() if line.startswith("S ")} == skipped
    else:
        assert (repo.path / "f1.txt").read_text() == "one\n"
        assert (repo.path / "new/é.bin").read_bytes() == b"\0one"
        assert not (repo.path / "f2.txt").exists()
        assert os.access(repo.path / "tool", os.X_OK)
    assert_nothing_left(world, repo, run)
    assert repo.git("worktree", "list", "--porcelain", "-z").replace(second["promoted_commit"], base) == worktrees
    assert_sound(repo)


def assert_nothing_left(world: World, repo: Repo, run: str = "r1") -> None:
    """No branch, anchor, registration, worktree, lock or scratch file of a run is left."""
    assert repo.git("for-each-ref", "refs/heads/lionagi", "refs/lionwt") == ""
    common = Path(os.path.realpath(repo.path / repo.git("rev-parse", "--git-common-dir")))
    admin = common / "worktrees"
    admins = list(admin.iterdir()) if admin.exists() else []
    assert [entry for entry in admins if b"/.worktrees/lionagi/" in (entry / "gitdir").read_bytes()] == []
    assert not (repo.path / ".worktrees").exists()
    stray = [path for path in common.rglob("*") if path.name.endswith(".lock") or path.name.startswith("lionwt-")]
    assert [path for path in stray if path.parent != common / "lionwt"] == []
    private = world.state(run) / "git"
    assert not private.exists() or list((private / "lionwt").iterdir()) == []


def assert_sound(repo: Repo) -> None:
    """``git fsck --strict`` has nothing to say but that something is dangling."""
    done = repo.run_git("fsck", "--strict", "--no-progress", "--no-dangling")
    assert (done.stdout, done.stderr) == (b"", b"")


@pytest.fixture
def world(tmp_path: Path, script_runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for name in list(os.environ):
        if name.startswith(("GIT_", "LIONAGI_", "LIONWT_", "XDG_")):
            monkeypatch.delenv(name)
    world = World(tmp_path, script_runner)
    # What a test calls in this process keeps its read-model in the test's own home as well.
    monkeypatch.setenv("LIONAGI_HOME", str(world.lionagi_home))
    yield world
    world.end()


@pytest.fixture
def repo(world: World) -> Repo:
    """The operator's checkout, on branch ``work``."""
    return world.repo()


def unprivileged() -> list[str]:
    """A command prefix under which file modes bite, for root as well."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root without setpriv: file modes do not bite")
    without = "-dac_override,-dac_read_search"
    return ["setpriv", f"--inh-caps={without}", f"--bounding-set={without}"]


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped (state T)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False


def answer_of(child: subprocess.Popen[str]) -> Answer:
    """Wait for a started command and return its answer."""
    out, err = child.communicate(timeout=60)
    return Answer(child.returncode, out, err)


def go_on(child: subprocess.Popen[str], *signals: int) -> Answer:
    """Let a stopped command continue, after sending it ``signals``; returns its answer."""
    for number in signals:
        child.send_signal(number)
    child.send_signal(signal.SIGCONT)
    return answer_of(child)


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait for a state, bounded; returns what ``condition`` gave."""
    import time

    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError("the awaited state did not come")
        time.sleep(0.01)
    return found

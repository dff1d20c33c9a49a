"""The verbs on a large repository, against the plain git commands that do the same unsafely."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.bench.support import LIONWT, Bench, Row, best, seconds

WORKERS = 20
FILES = 20_000


def measure(bench: Bench) -> Iterator[Row]:
    """Rows for lease, freeze, memory, and the whole job."""
    repo = bench.repository("large", FILES)
    yield from _lease(bench, repo)
    yield from _freeze(bench, repo)
    yield from _memory(bench)
    yield from _whole_job(bench)


def _leased(bench: Bench, repo: Path, run: str, workers: int, **env: str) -> list[Path]:
    names = [word for number in range(workers) for word in ("-w", f"w{number}")]
    out = bench.run(
        LIONWT, "lease", run, *names, "--target", "work", "--policy", "merge_validated",
        "--owner-pid", "none", "--json", cwd=repo, env=env,
    )  # fmt: skip
    return [Path(lease["worktree_path"]) for lease in json.loads(out)["leases"]]


def _lease(bench: Bench, repo: Path) -> Iterator[Row]:
    plain_root = bench.root / "plain"

    def plain() -> None:
        script = f"for n in $(seq {WORKERS}); do git worktree add -q -b plain/$n {plain_root}/$n HEAD; done"
        bench.run("sh", "-ec", script, cwd=repo)

    least = [float("inf"), float("inf")]
    for number in range(2):
        least[0] = min(least[0], seconds(plain))
        bench.run(
            "sh",
            "-ec",
            f"rm -rf {plain_root}; git worktree prune; git branch -q --list 'plain/*' | xargs git branch -qD",
            cwd=repo,
        )
        bench.settle()
        least[1] = min(least[1], seconds(lambda number=number: _leased(bench, repo, f"lease{number}", WORKERS)))  # type: ignore[misc]
        _forget(bench, repo, f"lease{number}")
        bench.settle()
    yield Row(f"loop of git worktree add, {WORKERS} x {FILES} files", least[0], "s")
    yield Row(f"lionwt lease of {WORKERS} in one call / that loop", least[1], "s", least[1] / least[0], 0.8)


def _forget(bench: Bench, repo: Path, run: str) -> None:
    """Drop a run without measuring it."""
    shutil.rmtree(repo / ".worktrees")
    shutil.rmtree(bench.root / "lionagi/runs" / run)
    bench.run("git", "-c", "core.hooksPath=/dev/null", "worktree", "list", cwd=repo)
    for admin in (repo / ".git/worktrees").iterdir():
        shutil.rmtree(admin)
    bench.run(
        "sh",
        "-ec",
        "git for-each-ref --format='delete %(refname)' refs/heads/lionagi | git update-ref --stdin",
        cwd=repo,
    )


def _freeze(bench: Bench, repo: Path) -> Iterator[Row]:
    for changed, budget in ((10, 1.5), (2500, None)):
        plain, ours = [], []
        for number in range(3):
            run = f"freeze{changed}-{number}"
            (worktree,) = _leased(bench, repo, run, 1)
            bench.run(LIONWT, "start", run, "w0", cwd=repo)
            bench.settle()
            for file in range(changed):
                path = worktree / f"d{file * 7 % (FILES // 100):03d}" / f"f{file % 100:02d}.txt"
                path.write_text(f"changed {file} in {run}\n")
            index = bench.root / "fresh-index"
            index.unlink(missing_ok=True)
            # Its own object store, so that neither side finds the other's objects.
            objects = bench.root / "fresh-objects"
            shutil.rmtree(objects, ignore_errors=True)
            objects.mkdir()
            env = {
                "GIT_INDEX_FILE": str(index),
                "GIT_OBJECT_DIRECTORY": str(objects),
                "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(repo / ".git/objects"),
            }

            def add(env: dict[str, str] = env, worktree: Path = worktree) -> None:
                bench.run("git", "-c", "core.fsync=all", "add", "-A", cwd=worktree, env=env)
                bench.run("git", "-c", "core.fsync=all", "write-tree", cwd=worktree, env=env)

            plain += best(1, add)
            ours += best(1, lambda run=run: bench.run(LIONWT, "freeze", run, "w0", "--succeeded", cwd=repo))  # type: ignore[misc]
            bench.run(LIONWT, "promote", run, "--policy", "patch_only", cwd=repo)
        ratio = min(ours) / min(plain)
        yield Row(f"git add -A + write-tree, {changed} of {FILES} changed", min(plain) * 1000, "ms")
        yield Row(f"lionwt freeze, {changed} of {FILES} changed / that", min(ours) * 1000, "ms", ratio, budget)


def _whole_job(bench: Bench) -> Iterator[Row]:
    """20 workers, each: add, edit, diff, commit, merge, remove."""
    for files in (200, FILES):
        repo = bench.repository(f"job-plain-{files}", files)
        script = f"""
        for n in $(seq {WORKERS}); do git worktree add -q -b job/$n ../job-{files}/$n HEAD; done
        for n in $(seq {WORKERS}); do
            cd ../job-{files}/$n; echo new > new$n.txt; git add -A
            git diff --cached --binary > ../$n.patch; git commit -qm $n; cd {repo}
        done
        for n in $(seq {WORKERS}); do
            git merge -q --no-ff -m $n job/$n; git worktree remove ../job-{files}/$n; git branch -q -D job/$n
        done
        """
        plain = seconds(lambda repo=repo, script=script: bench.run("sh", "-ec", script, cwd=repo))  # type: ignore[misc]
        bench.settle()
        ours_repo = bench.repository(f"job-ours-{files}", files)

        def ours(repo: Path = ours_repo, files: int = files) -> None:
            run = f"job{files}"
            worktrees = _leased(bench, repo, run, WORKERS)
            for number, worktree in enumerate(worktrees):
                bench.run(LIONWT, "start", run, f"w{number}", cwd=repo)
                (worktree / f"new{number}.txt").write_text("new\n")
                bench.run(LIONWT, "freeze", run, f"w{number}", "--succeeded", cwd=repo)
            bench.run(LIONWT, "promote", run, cwd=repo)

        taken = seconds(ours)
        yield Row(f"plain git, whole job of {WORKERS} x {files} files", plain, "s")
        yield Row(
            f"lionwt, whole job of {WORKERS} x {files} files ({2 + 2 * WORKERS} commands) / that",
            taken,
            "s",
            taken / plain,
        )


def _memory(bench: Bench) -> Iterator[Row]:
    """lionwt's own peak memory while it freezes a small change and one of 500 MB."""
    repo = bench.repository("memory", 20)
    for megabytes, budget in ((1, None), (500, 150.0)):
        run = f"memory{megabytes}"
        (worktree,) = _leased(bench, repo, run, 1)
        bench.run(LIONWT, "start", run, "w0", cwd=repo)
        with open(worktree / "large.bin", "wb") as file:
            for _ in range(megabytes):
                file.write(os.urandom(1 << 20))
        script = (
            "import resource, sys\nfrom lionwt.cli import run\n"
            f"code = run(['freeze', '{run}', 'w0', '--succeeded', '--json'])\n"
            "sys.stderr.write('%d' % resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\nsys.exit(code)"
        )
        done = subprocess.run([sys.executable, "-c", script], cwd=repo, env=bench.env, capture_output=True, check=True)
        yield Row(
            f"lionwt's own peak memory, freeze of a {megabytes} MB file",
            int(done.stderr) / 1024,
            "MB",
            budget=budget,
        )
        bench.run(LIONWT, "promote", run, "--policy", "patch_only", cwd=repo)

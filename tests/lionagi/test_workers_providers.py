"""What every provider's process is given: its own worktree, its artifacts, its identity, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lionwt.errors import LionwtError
from lionwt.lionagi import providers
from lionwt.lionagi.leases import Held
from tests.conftest import LIONWT, Repo, World, assert_nothing_left
from tests.lionagi.conftest import Lionagi

MODELS = "claude/sonnet,codex/gpt-5.3-codex,gemini_code/gemini-4-argon,pi/google/m"
WORKERS = {"claude": "implementer", "codex": "implementer-2", "agy": "implementer-3", "pi": "implementer-4"}


def test_every_provider_stands_in_its_own_worktree_and_is_granted_its_artifacts_alone(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D2: the worktree is cwd and repo, the artifact directory the only other grant, the ids are pinned."""
    jobs: dict[str, list[list[Any]]] = {f"job-{n}": [["write", f"new-{n}.txt", f"{n}\n"]] for n in range(1, 5)}
    lionagi.plan(*jobs)
    # A prompt that mentions the shared checkout is no grant, and not refused.
    lionagi.jobs(jobs)
    words = ("o", "fanout", "claude/sonnet", f"look at {repo.path}", "-n", "4", "--yolo", "--workers", MODELS)
    answer = lionagi.li("li", "--policy", "merge_validated", *words, program=LIONWT)
    assert answer.code == 0, answer
    run = lionagi.run()
    artifacts = world.state(run) / "artifacts"
    seen = {call["name"]: call for call in lionagi.calls() if call["job"] in jobs}
    assert set(seen) == set(WORKERS)
    for name, worker in WORKERS.items():
        call, worktree = seen[name], str(repo.path / ".worktrees/lionagi" / run / worker)
        assert call["cwd"] == call["env"]["PWD"] == worktree
        ids = {key: value for key, value in call["env"].items() if key in PINS}
        assert ids == dict(zip(PINS, (run, world.lease_file(run, worker)["lease"]["session_id"], worker), strict=True))
        given = [word for word in call["arguments"] if word != call["prompt"]]
        directories = [given[at + 1] for at, word in enumerate(given) if word == "--add-dir"]
        assert directories == ([str(artifacts / worker)] if name in ("claude", "codex") else [])
        rest = " ".join(given).replace(worktree, "").replace(str(artifacts / worker), "")
        if name != "codex":  # its instructions are an argument
            assert str(repo.path) not in rest
        assert str(artifacts) not in rest
    codex = seen["codex"]["arguments"]
    assert codex[codex.index("-C") + 1] == seen["codex"]["cwd"]
    assert [(repo.path / f"new-{n}.txt").exists() for n in range(1, 5)] == [True] * 4
    assert_nothing_left(world, repo, run)


def test_a_spawned_worker_of_every_provider_is_bound_to_its_own_lease(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D2: a clone of the one that asked for it, with nothing of that one's binding."""
    jobs: dict[str, list[list[Any]]] = {}
    for n in range(1, 5):
        request = {"instruction": f"more-{n}", "reason": "more", "operation": "operate"}
        jobs[f"job-{n}"] = [["say", json.dumps({"spawn_request": request})]]
        jobs[f"more-{n}"] = [["write", f"new-{n}.txt", f"{n}\n"]]
    lionagi.plan(*(f"job-{n}" for n in range(1, 5)))
    lionagi.jobs(jobs)
    words = ("o", "flow", "claude/sonnet", "x", "--yolo", "--workers", MODELS)
    answer = lionagi.li("li", "--policy", "merge_validated", *words, program=LIONWT)
    run = lionagi.run()
    spawned = [call for call in lionagi.calls() if call["job"].startswith("more-")]
    assert {call["name"] for call in spawned} == set(WORKERS), answer
    assert len({call["env"]["LIONAGI_WORKER_ID"] for call in spawned}) == 4
    for call in spawned:
        worker, given = call["env"]["LIONAGI_WORKER_ID"], [word for word in call["arguments"] if word != call["prompt"]]
        worktree, artifacts = str(repo.path / ".worktrees/lionagi" / run / worker), world.state(run) / "artifacts"
        assert worker.startswith("spawn-")
        assert call["cwd"] == call["env"]["PWD"] == worktree
        directories = [given[at + 1] for at, word in enumerate(given) if word == "--add-dir"]
        assert directories == ([str(artifacts / worker)] if call["name"] in ("claude", "codex") else [])
        rest = " ".join(word for word in given if not word.startswith("developer_instructions="))
        rest = rest.replace(worktree, "").replace(str(artifacts / worker), "")
        assert str(repo.path) not in rest
        assert world.record(run, worker)["status"] == "promoted"
    assert [(repo.path / f"new-{n}.txt").exists() for n in range(1, 5)] == [True] * 4
    assert_nothing_left(world, repo, run)


def test_a_codex_whose_user_trusts_the_repository_works(world: World, repo: Repo, lionagi: Lionagi) -> None:
    """lionagi hands every worker all directories that the user's codex trusts: that grants none of them."""
    (world.home / ".codex").mkdir()
    trusted = f'[projects."{repo.path}"]\ntrust_level = "trusted"\n'
    (world.home / ".codex/config.toml").write_text(trusted)
    lionagi.plan("job-1")
    lionagi.jobs({"job-1": [["write", "new.txt", "1\n"]]})
    words = ("o", "fanout", "codex/gpt-5.3-codex", "x", "-n", "1", "--yolo", "--with-synthesis")
    answer = lionagi.li("li", "--policy", "merge_validated", *words, program=LIONWT)
    assert answer.code == 0, answer
    assert any(f'"{repo.path}" = {{ trust_level' in word for word in lionagi.calls("job-1")[0]["arguments"])
    assert (repo.path / "new.txt").exists()
    assert_nothing_left(world, repo, lionagi.run())


def test_a_codex_whose_user_opens_the_repository_is_not_started_and_why_is_told(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D2: a grant of the user's settings is a grant; lionagi says only that the worker failed."""
    (world.home / ".codex").mkdir()
    opened = f'sandbox_mode = "workspace-write"\n[sandbox_workspace_write]\nwritable_roots = ["{repo.path}"]\n'
    (world.home / ".codex/config.toml").write_text(opened)
    lionagi.plan("job-1")
    words = ("o", "fanout", "claude/sonnet", "x", "-n", "1", "--yolo", "--workers", "codex/gpt-5.3-codex")
    answer = lionagi.li("li", *words, program=LIONWT)
    assert answer.code == 1, answer
    assert lionagi.calls("job-1") == []
    [told] = [line for line in answer.err.splitlines() if line.startswith("lionwt: implementer: ")]
    assert "discarded, it changed nothing; the configuration of codex opens other directories" in told
    assert told.endswith("[grants_mismatch]; remove it from the agent's profile or settings")
    assert_nothing_left(world, repo, lionagi.run())


def test_a_light_worker_has_its_worktree_and_is_granted_no_more_than_any_other(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D2: a light codex takes no second directory, so it gets none; a light claude gets its artifacts."""
    lionagi.profile("codexer", model="codex/gpt-5.3-codex", workload="light")
    lionagi.profile("clauder", model="claude/sonnet", workload="light")
    lionagi.plan("job-1", "job-2", roles=("codexer", "clauder"))
    jobs: dict[str, list[list[Any]]] = {f"job-{n}": [["write", f"new-{n}.txt", f"{n}\n"]] for n in (1, 2)}
    lionagi.jobs(jobs)
    words = ("o", "flow", "claude/sonnet", "x", "--yolo")
    answer = lionagi.li("li", "--policy", "merge_validated", *words, program=LIONWT)
    assert answer.code == 0, answer
    run = lionagi.run()
    for job, worker in (("job-1", "codexer"), ("job-2", "clauder")):
        [call] = lionagi.calls(job)
        assert call["cwd"] == str(repo.path / ".worktrees/lionagi" / run / worker)
        words = call["arguments"]
        given = [words[at + 1] for at, word in enumerate(words) if word == "--add-dir"]
        assert given == ([] if worker == "codexer" else [str(world.state(run) / "artifacts" / worker)])
    [codex] = lionagi.calls("job-1")
    assert codex["arguments"][codex["arguments"].index("--sandbox") + 1] == "workspace-write"
    assert "sandbox_workspace_write.writable_roots=[]" in codex["arguments"]
    assert [(repo.path / f"new-{n}.txt").exists() for n in (1, 2)] == [True] * 2
    assert_nothing_left(world, repo, run)


PINS = ("LIONAGI_RUN_ID", "LIONAGI_SESSION_ID", "LIONAGI_WORKER_ID")


def held(root: Path) -> Held:
    """A lease of worker ``w1`` beside that of ``w2``, as lionwt lays them out."""
    worktrees, artifacts = root / "repo/.worktrees/lionagi/r1", root / "runs/r1/artifacts"
    for place in (worktrees / "w1", worktrees / "w2", artifacts / "w1", artifacts / "w2"):
        place.mkdir(parents=True)
    (worktrees / "w1/out").symlink_to(root / "repo")
    checkouts = (root / "repo", root / "repo")
    return Held("w1", worktrees / "w1", artifacts / "w1", dict.fromkeys(PINS, "x"), checkouts)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("claude", ["-p", "x", "--add-dir", "{own}", "{repo}"]),
        ("claude", ["-p", "x", "--add-dir={repo}"]),
        ("claude", ["-p", "x", "--add-dir", "{sibling}"]),
        ("claude", ["-p", "x", "--add-dir", "{siblings_artifacts}"]),
        ("claude", ["-p", "x", "--add-dir", "{own}/.."]),
        ("claude", ["-p", "x", "--add-dir", "{own}/out"]),
        ("claude", ["-p", "x", "--add-dir", "out"]),
        ("claude", ["-p", "x", "--add-dir", "/"]),
        ("claude", ["-p", "x", "--add-dir", "~"]),
        ("claude", ["-p", "x", "--settings", '{"permissions": {"additionalDirectories": ["/"]}}']),
        ("claude", ["-p", "x", "--settings", '{"sandbox": {"filesystem": {"allowWrite": ["~/"]}}}']),
        ("claude", ["-p", "x", "--settings", "{repo}/settings.json"]),
        ("claude", ["-p", "x", "--mcp-config", '{"mcpServers": {"fs": {"command": "fs", "args": ["{repo}"]}}}']),
        ("claude", ["-p", "x", "--plugin-dir", "{repo}/plugin"]),
        ("codex", ["exec", "-C", "{repo}"]),
        ("codex", ["exec", "-C", "{own}", "--add-dir", "{repo}/.git/refs"]),
        ("codex", ["exec", "-c", 'sandbox_workspace_write.writable_roots=["/tmp"]']),
        ("codex", ["exec", "-c", 'sandbox_workspace_write.writable_roots=["sub/../.."]']),
        ("claude", ["-p", "x", "-c", 'projects={"{repo}" = {}}']),
        ("codex", ["exec", "-c", 'mcp_servers.fs.args=["{repo}"]']),
        ("gemini", ["-p", "x", "--add-dir", "{repo}"]),
        ("gemini", ["-p", "x", "--include-directories", "{repo}"]),
        ("pi", ["-p", "--extension", "{repo}/x.ts", "the prompt"]),
    ],
)
def test_a_command_line_that_grants_anything_else_is_not_started(tmp_path: Path, engine: str, words: list[str]) -> None:
    """ADR-0091 D2: neither the shared checkout nor a sibling is in any grant, whoever put it there."""
    lease = held(tmp_path)
    places = {
        "{repo}": str(tmp_path / "repo"),
        "{own}": str(lease.worktree),
        "{sibling}": str(lease.worktree.parent / "w2"),
        "{siblings_artifacts}": str(lease.artifacts.parent / "w2"),
    }
    command = [engine]
    for word in words:
        for name, path in places.items():
            word = word.replace(name, path)
        command.append(word)
    with pytest.raises(LionwtError) as refused:
        providers.confined(command, lease.worktree, engine, lease)
    assert refused.value.code == "grants_mismatch"


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("claude", ["-p", "edit {repo}/f", "--add-dir", "{artifacts}", "--append-system-prompt", "in {repo}", "-v"]),
        ("claude", ["-p", "--add-dir {repo}", "--settings", '{"permissions": {"additionalDirectories": ["{own}"]}}']),
        ("codex", ["exec", "-C", "{own}", "--add-dir", "{artifacts}", "-c", 'developer_instructions="in {repo}"', "-"]),
        ("codex", ["exec", "-c", 'projects={"{repo}" = {}}', "-c", 'hooks.state={"{repo}/h:0" = {enabled = true}}']),
        ("gemini", ["-p", "in {repo}", "--model", "m"]),
        ("pi", ["-p", "--mode", "json", "--append-system-prompt", "in {repo}", "look at {repo}"]),
    ],
)
def test_what_a_prompt_mentions_is_no_grant(tmp_path: Path, engine: str, words: list[str]) -> None:
    """ADR-0091 D2: a prompt mentioning the host checkout does not create a path grant, nor a refusal."""
    lease = held(tmp_path)
    places = {"{repo}": tmp_path / "repo", "{own}": lease.worktree, "{artifacts}": lease.artifacts}
    command = [engine]
    for word in words:
        for name, path in places.items():
            word = word.replace(name, str(path))
        command.append(word)
    providers.confined(command, lease.worktree, engine, lease)


@pytest.mark.parametrize(("cwd", "engine"), [("repo", "claude"), ("repo/.worktrees/lionagi/r1/w2", "pi"), (".", None)])
def test_a_process_that_would_stand_elsewhere_is_not_started(tmp_path: Path, cwd: str, engine: str | None) -> None:
    """ADR-0091 D2: the worktree is the provider's working directory; an unknown provider has none."""
    with pytest.raises(LionwtError):
        providers.confined(["program"], tmp_path / cwd, engine, held(tmp_path))


@pytest.mark.parametrize("which", ["worktree", "artifacts"])
def test_a_place_of_the_lease_that_became_a_link_is_not_granted(tmp_path: Path, which: str) -> None:
    """ADR-0091 D2: what a lease names is granted, and not what a sibling made of it."""
    lease = held(tmp_path)
    place: Path = getattr(lease, which)
    shutil.rmtree(place)
    place.symlink_to(tmp_path / "repo")
    with pytest.raises(LionwtError, match="symbolic link"):
        providers.confined(["claude", "-p", "x", "--add-dir", str(lease.artifacts)], lease.worktree, "claude", lease)


def test_a_profile_that_grants_the_checkout_to_a_worker_ends_that_worker_before_it_starts(
    world: World, repo: Repo, lionagi: Lionagi
) -> None:
    """ADR-0091 D3: running only after the grants match; a refused worker has a record, and did nothing."""
    servers = {"mcpServers": {"files": {"command": "files", "args": [str(repo.path)]}}}
    (world.root / "servers.json").write_text(json.dumps(servers))
    lionagi.plan("job-1")
    lionagi.jobs({"job-1": [["write", "bad.txt", "bad\n"]]})
    words = ("o", "fanout", "claude/sonnet", "x", "-n", "1", "--yolo", "--mcp-config", str(world.root / "servers.json"))
    answer = lionagi.li("li", *words, program=LIONWT)
    assert answer.code != 0, answer
    assert "grants_mismatch" in answer.err or "not of the lease" in answer.out + answer.err, answer
    assert lionagi.calls() == []
    run = lionagi.run()
    assert world.record(run, "orchestrator")["status"] == "discarded"
    assert_nothing_left(world, repo, run)

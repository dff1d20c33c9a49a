"""Nothing that a worker configured is executed or followed, and nothing of its work is hidden by it.

Every attack plants a canary program or points at a victim directory from inside
the worktree, through the ways in which a linked worktree shares the repository
(what plain git then does is measured, not assumed). Afterwards every verb runs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import Repo, World, files_of


class Trap:
    """A canary program that writes its name down when it is executed, and a victim directory."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.log = world.root / "executed.log"
        self.bin = world.root / "canaries"
        self.bin.mkdir()
        self.victim = world.root / "victim"
        (self.victim / "sub").mkdir(parents=True)
        for name in ("f1.txt", "precious.txt", "sub/deep.txt"):
            (self.victim / name).write_text("precious\n")
        self.before = files_of(self.victim)

    def canary(self, name: str) -> str:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\necho {name} >> {self.log}\ncat 2>/dev/null </dev/null\nexit 0\n")
        path.chmod(0o755)
        return str(path)

    def assert_untouched(self) -> None:
        assert not self.log.exists(), f"executed: {self.log.read_text()}"
        assert files_of(self.victim) == self.before


@pytest.fixture
def trap(world: World) -> Trap:
    return Trap(world)


def test_the_canary_sings_when_plain_git_is_used(world: World, repo: Repo, trap: Trap) -> None:
    """The traps of this file are real: the same set-up runs the worker's program under plain git."""
    worker = world.lease("r1", "w1")["w1"]
    _configure(repo, worker, trap, "local")
    repo.write("f1.txt", "edit\n")
    repo.run_git("status", check=False)
    assert "fsmonitor" in trap.log.read_text()
    repo.run_git("commit", "-qam", "x", check=False)
    assert {"gpg", "clean"} <= set(trap.log.read_text().split())


# Programs --------------------------------------------------------------------

PROGRAMS = {
    "core.fsmonitor": "fsmonitor",
    "filter.evil.clean": "clean",
    "filter.evil.smudge": "smudge",
    "diff.external": "diff-external",
    "diff.evil.textconv": "textconv",
    "diff.evil.command": "diff-command",
    "merge.evil.driver": "merge-driver",
    "gpg.program": "gpg",
    "gpg.ssh.program": "gpg-ssh",
    "core.pager": "pager",
    "core.editor": "editor",
    "sequence.editor": "sequence-editor",
    "core.askPass": "askpass",
    "core.sshCommand": "ssh",
    "core.gitProxy": "proxy",
    "core.alternateRefsCommand": "alternate-refs",
    "credential.helper": "credential",
    "uploadpack.packObjectsHook": "pack-objects",
    "trailer.sign.cmd": "trailer",
    "init.templateDir": "template",
    "pager.log": "pager-log",
    "interactive.diffFilter": "diff-filter",
    "mergetool.evil.cmd": "mergetool",
}
ALIASES = ("add", "update-index", "write-tree", "read-tree", "ls-files", "apply", "worktree", "x")
SWITCHES = {
    "commit.gpgSign": "true",
    "tag.gpgSign": "true",
    "log.showSignature": "true",
    "merge.verifySignatures": "true",
    "filter.evil.required": "true",
    "merge.renames": "false",
    "gc.auto": "1",
    "gc.pruneExpire": "now",
    "maintenance.auto": "true",
    "rerere.enabled": "true",
    "rerere.autoUpdate": "true",
    "core.logAllRefUpdates": "always",
    "submodule.recurse": "true",
    "core.untrackedCache": "true",
    "core.splitIndex": "true",
    "core.sparseCheckout": "true",
    "remote.evil.promisor": "true",
    "protocol.ext.allow": "always",
    "branch.work.mergeOptions": "--squash --no-commit",
}


def _hooks(where: Path, trap: Trap) -> None:
    where.mkdir(exist_ok=True)
    for name in (
        "post-checkout", "reference-transaction", "post-index-change", "prepare-commit-msg", "commit-msg",
        "pre-commit", "post-commit", "pre-merge-commit", "post-merge", "pre-auto-gc", "post-rewrite", "pre-push",
        "fsmonitor-watchman", "update", "proc-receive", "push-to-checkout", "applypatch-msg",
    ):  # fmt: skip
        shutil.copy(trap.canary(f"hook-{name}"), where / name)


def _configure(repo: Repo, worker: Repo, trap: Trap, place: str) -> None:
    """Plant every program and switch at once, as the worker can: by writing configuration files."""
    text = ""
    settings = {name: trap.canary(word) for name, word in PROGRAMS.items()} | SWITCHES
    settings |= {f"alias.{name}": f"!{trap.canary('alias')}" for name in ALIASES}
    settings["remote.evil.url"] = f"ext::{trap.canary('remote')}"
    if place == "local":
        settings["core.hooksPath"] = str(trap.bin / "hooks")
        _hooks(trap.bin / "hooks", trap)
    else:
        _hooks(repo.path / ".git/hooks", trap)
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        head, _, sub = section.partition(".")
        text += f'[{head} "{sub}"]\n' if sub else f"[{head}]\n"
        text += f'\t{key} = "{value}"\n'
    config = repo.path / ".git/config"
    if place == "local":
        config.write_text(config.read_text() + text)
    elif place == "included":
        (trap.bin / "included").write_text(text)
        config.write_text(config.read_text() + f"[include]\n\tpath = {trap.bin / 'included'}\n")
    else:
        worker.git("config", "extensions.worktreeConfig", "true")
        (repo.path / ".git/config.worktree").write_text(text)
        admin = Path(trap.world.lease_file("r1", "w1")["identity"]["admin_dir"])
        (admin / "config.worktree").write_text(text)
    (repo.path / ".git/info/attributes").write_text("* filter=evil diff=evil merge=evil\n")
    worker.write(".gitattributes", "* filter=evil diff=evil merge=evil\n")


@pytest.mark.parametrize("place", ["local", "included", "worktree"])
def test_no_program_that_a_worker_configured_is_ever_executed(world: World, repo: Repo, trap: Trap, place: str) -> None:
    """Design 10, invariant 22: through every verb, for the attacker, its siblings, and whoever comes later."""
    world.lease("r1", "w1", "w2")
    worker, sibling = (Repo(repo.path / ".worktrees/lionagi/r1" / name, world.environment()) for name in ("w1", "w2"))
    worker.commit("committed", **{"mine.txt": "mine\n"})
    _configure(repo, worker, trap, place)
    worker.write("f1.txt", "attacked\n")
    sibling.write("f2.txt", "sibling\n")
    later = world.lease("r1", "w3")["w3"]
    later.write("f3.txt", "later\n")
    for name in ("w1", "w2", "w3"):
        answer = world.freeze("r1", name)
        assert answer.code == 0, answer
    trap.assert_untouched()
    kept = {name: (world.evidence("r1", name) / "candidate.patch").read_bytes() for name in ("w1", "w2", "w3")}
    assert b"+attacked" in kept["w1"] and b"+mine" in kept["w1"]
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert [record["status"] for record in answer.json["records"]] == ["promoted"] * 3
    assert world.promote("r1").code == 0
    assert world.freeze("r1", "w1").code == 0
    fresh = world.lionwt("lease", "r2", "-w", "w1", "--target", "work", "--json")
    assert (fresh.code, fresh.error) == (3, "filter_untrusted"), fresh
    trap.assert_untouched()
    for name, content in (("f1.txt", "attacked\n"), ("f2.txt", "sibling\n"), ("f3.txt", "later\n")):
        assert (repo.path / name).read_text() == content


# Settings and files that lead elsewhere or hide work -------------------------


@dataclass(frozen=True)
class Attack:
    """One attack; ``promote`` is the exit code of the promotion, ``mend`` clears an obstacle.

    ``stands`` is what the checkout holds otherwise than the worktree did.
    """

    plant: Callable[[World, Repo, Repo, Trap], None]
    freeze: int = 0
    promote: int = 0
    error: str | None = None
    mend: Callable[[World, Repo, Repo], None] | None = None
    stands: Mapping[bytes, tuple[str, bytes]] = field(default_factory=dict)


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + text)


def _admin(world: World) -> Path:
    return Path(world.lease_file("r1", "w1")["identity"]["admin_dir"])


def core_worktree(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    worker.git("config", "core.worktree", str(trap.victim))


def core_bare(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    worker.git("config", "core.bare", "true")


def excludes(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    (trap.bin / "excludes").write_text("*\n")
    worker.git("config", "core.excludesFile", str(trap.bin / "excludes"))
    _append(repo.path / ".git/info/exclude", "*\n")
    _append(_admin(world) / "info/exclude", "*\n")


def file_mode(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    worker.git("config", "core.fileMode", "false")
    worker.git("config", "core.symlinks", "false")
    (worker.path / "f1.txt").chmod(0o755)
    worker.write("run.sh", "#!/bin/sh\n").chmod(0o755)
    (worker.path / "link").symlink_to("f1.txt")


def stat_checks(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    worker.git("config", "core.trustctime", "false")
    worker.git("config", "core.checkStat", "minimal")
    worker.git("config", "core.ignoreStat", "true")
    world.settle_index("r1", "w1")
    path = worker.path / "f1.txt"
    seen, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b"line", b"enil"))
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def conversions(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    worker.git("config", "core.autocrlf", "input")
    worker.git("config", "core.eol", "crlf")
    (trap.bin / "attributes").write_text("* text=auto ident\n")
    worker.git("config", "core.attributesFile", str(trap.bin / "attributes"))
    _append(repo.path / ".git/info/attributes", "* text=auto ident\n")
    worker.write("crlf.txt", "one\r\n$Id: mine $\r\n")


def sparse_settings(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    for name in ("core.sparseCheckout", "core.sparseCheckoutCone", "index.sparse"):
        worker.git("config", name, "true")
    _append(repo.path / ".git/info/sparse-checkout", "/nothing/\n")
    _append(_admin(world) / "info/sparse-checkout", "/nothing/\n")


def split_index(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    worker.write("forced.log", "forced\n")
    worker.git("add", "--force", "forced.log")
    worker.git("update-index", "--split-index")
    worker.git("update-index", "--skip-worktree", "f1.txt")
    worker.write("f1.txt", "edited\n")


def unknown_extension(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    _append(repo.path / ".git/config", "[core]\n\trepositoryformatversion = 1\n[extensions]\n\tevil = true\n")


def newer_format(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    _append(repo.path / ".git/config", "[core]\n\trepositoryformatversion = 99\n")


def broken_config(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    _append(repo.path / ".git/config", "[this is not\n")


def replaced_base(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    base = worker.head()
    tree = worker.git("mktree", input=b"")
    other = worker.git("commit-tree", tree, "-m", "false base")
    blobs = [worker.git("rev-parse", f"{base}:{name}") for name in ("f2.txt", "f3.txt")]
    worker.git("replace", base, other)
    worker.git("replace", *blobs)


def grafts(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    orphan = worker.git("commit-tree", worker.git("mktree", input=b""), "-m", "orphan")
    _append(repo.path / ".git/info/grafts", f"{worker.head()} {orphan}\n")


def odd_refs(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    for name in ("-evil", "--all", "HEAD", "lionagi/r1/w1.x", "a\u202eb", "@"):
        worker.git("update-ref", f"refs/heads/{name}", "HEAD")
    worker.git("update-ref", "refs/tags/work", "HEAD")
    worker.git("update-ref", "refs/work", "HEAD")
    worker.git("update-ref", f"refs/heads/{worker.head()}", "HEAD")


def edited_gitdir(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    (_admin(world) / "gitdir").write_text(f"{trap.victim}/.git\n")


def edited_commondir(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    evil = world.repo("evil")
    (_admin(world) / "commondir").write_text(f"{evil.path / '.git'}\n")
    evil.git("config", "core.fsmonitor", trap.canary("other-repository"))


def garbage_head(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    (_admin(world) / "HEAD").write_text("garbage\n")


def head_on_target(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    (_admin(world) / "HEAD").write_text("ref: refs/heads/work\n")


def linked_index(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    (_admin(world) / "index").unlink()
    (_admin(world) / "index").symlink_to(trap.victim / "precious.txt")


def alternates(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    evil = world.repo("evil")
    _append(repo.path / ".git/objects/info/alternates", f"{evil.path / '.git/objects'}\n/nowhere\n")


def fifo_rules(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    (worker.path / "sub").mkdir(exist_ok=True)
    os.mkfifo(worker.path / "sub/.gitignore")


def nested_with_programs(world: World, repo: Repo, worker: Repo, trap: Trap) -> None:
    inner = Repo(worker.path / "inner", worker.env)
    inner.path.mkdir()
    inner.git("init", "-q")
    inner.commit("inner", **{"code.txt": "code\n", ".gitattributes": "* filter=evil\n"})
    _arm(inner.path / ".git/config", trap)
    inner.write("code.txt", "edited\n")


def _arm(config: Path, trap: Trap) -> None:
    text = f"[core]\n\tfsmonitor = {trap.canary('nested-fsmonitor')}\n\thooksPath = {trap.bin}\n"
    text += f'[filter "evil"]\n\tclean = {trap.canary("nested-clean")}\n\trequired\n'
    _append(config, text)


def _unset(*keys: str) -> Callable[[World, Repo, Repo], None]:
    def mend(world: World, repo: Repo, worker: Repo) -> None:
        for key in keys:
            repo.run_git("config", "--file", repo.path / ".git/config", "--unset-all", key, cwd=world.root)

    return mend


def _restore_config(world: World, repo: Repo, worker: Repo) -> None:
    shutil.copy(world.root / "config.before", repo.path / ".git/config")


def _restore_head(world: World, repo: Repo, worker: Repo) -> None:
    (_admin(world) / "HEAD").write_text("ref: refs/heads/lionagi/r1/w1\n")


def _remove_fifo(world: World, repo: Repo, worker: Repo) -> None:
    (worker.path / "sub/.gitignore").unlink()


def _dissolve(world: World, repo: Repo, worker: Repo) -> None:
    shutil.rmtree(worker.path / "inner/.git")


def _remove_index(world: World, repo: Repo, worker: Repo) -> None:
    (_admin(world) / "index").unlink()


ATTACKS = [
    Attack(core_worktree, promote=7, error="repository_unsafe", mend=_unset("core.worktree")),
    Attack(core_bare, promote=7, error="repository_unsafe", mend=_restore_config),
    Attack(excludes),
    # The tree is whole; in the checkout a link is what the operator's own git makes of it by then.
    Attack(file_mode, stands={b"link": ("100644", b"f1.txt")}),
    Attack(stat_checks),
    Attack(conversions),
    Attack(sparse_settings),
    Attack(split_index),
    Attack(unknown_extension, freeze=8, error="git_failed", mend=_restore_config),
    Attack(newer_format, freeze=8, error="git_failed", mend=_restore_config),
    Attack(broken_config, freeze=8, error="git_failed", mend=_restore_config),
    Attack(replaced_base),
    Attack(grafts),
    Attack(odd_refs),
    Attack(edited_gitdir),
    Attack(edited_commondir),
    Attack(garbage_head),
    Attack(head_on_target, promote=4, error="checkout_blocked", mend=_restore_head),
    Attack(linked_index, freeze=4, error="patch_missing", mend=_remove_index),
    Attack(alternates),
    Attack(fifo_rules, freeze=4, error="patch_missing", mend=_remove_fifo),
    Attack(nested_with_programs, freeze=4, error="embedded_repository", mend=_dissolve),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.plant.__name__)
def test_an_attack_neither_runs_nor_leads_astray_nor_hides_work(
    world: World, repo: Repo, trap: Trap, attack: Attack
) -> None:
    """Design 6: content work knows nothing of what a worker configured; where git cannot go on, it says why."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    worker.write("f3.txt", "edited\n")
    shutil.copy(repo.path / ".git/config", world.root / "config.before")
    packed = repo.run_git("pack-objects", "--revs", "--stdout", "-q", input=b"HEAD\n").stdout
    (world.root / "base.pack").write_bytes(packed)
    attack.plant(world, repo, worker, trap)
    refs = world.standing("r1", "w1")
    answer = world.freeze("r1", "w1")
    assert answer.code == attack.freeze, answer
    assert world.standing("r1", "w1") == refs
    if attack.freeze:
        assert answer.error == attack.error
        assert world.lease_file("r1", "w1")["lease"]["state"] == "running"
        trap.assert_untouched()
        assert attack.mend is not None
        attack.mend(world, repo, worker)
        assert world.freeze("r1", "w1").code == 0
    wanted = files_of(worker.path)
    clean = world.root / "clean"
    _materialise(world, repo, clean)
    assert files_of(clean) == wanted
    answer = world.promote("r1")
    if attack.promote:
        assert (answer.code, answer.error) == (attack.promote, attack.error), answer
        assert world.lease_file("r1", "w1")["lease"]["state"] == "frozen"
        trap.assert_untouched()
        assert attack.mend is not None
        attack.mend(world, repo, worker)
        answer = world.promote("r1")
    assert answer.code == 0, answer
    record = answer.json["records"][0]
    assert (record["status"], record["worktree_removed"], record["branch_deleted"]) == ("promoted", True, True)
    assert world.promote("r1").code == 0
    trap.assert_untouched()
    landed = {name: entry for name, entry in files_of(repo.path).items() if not name.startswith(b".git/")}
    assert landed == {**wanted, **attack.stands}


def _materialise(world: World, repo: Repo, where: Path) -> None:
    """Apply the patch to the base in a repository that has nothing of the attacked one but the base."""
    fresh = Repo(where, world.environment())
    where.mkdir()
    fresh.git("init", "-q")
    fresh.git("index-pack", "--stdin", input=(world.root / "base.pack").read_bytes())
    fresh.git("read-tree", world.lease_file("r1", "w1")["lease"]["base_sha"])
    fresh.git("checkout-index", "-a", "-u")
    fresh.git("apply", "--index", "--binary", "--whitespace=nowarn", world.evidence("r1", "w1") / "candidate.patch")
    assert fresh.git("write-tree") == world.manifest("r1", "w1")["tree"]


def test_a_head_that_is_a_fifo_is_not_waited_for(world: World, repo: Repo) -> None:
    """Design 10, invariant 24: every wait is bounded; the commits come from the worktree's reflog."""
    worker = world.lease("r1", "w1")["w1"]
    tip = worker.commit("own", **{"own.txt": "own\n"})
    (_admin(world) / "HEAD").unlink()
    os.mkfifo(_admin(world) / "HEAD")
    answer = world.freeze("r1", "w1")
    assert answer.code == 0, answer
    assert answer.json["candidate"]["files_changed"] == ["own.txt"]
    bundle = world.evidence("r1", "w1") / "commits.bundle"
    assert tip in repo.git("bundle", "list-heads", bundle)


def test_programs_of_a_submodule_are_not_executed(world: World, repo: Repo, trap: Trap) -> None:
    """Design 6: a submodule's repository is the worker's, and is read through lionwt's own configuration."""
    upstream = world.repo("lib", branch="main")
    repo.git("submodule", "--quiet", "add", str(upstream.path), "lib")
    repo.commit("submodule")
    worker = world.lease("r1", "w1")["w1"]
    worker.git("submodule", "--quiet", "update", "--init")
    inner = Repo(worker.path / "lib", worker.env)
    tip = inner.commit("inside", **{".gitattributes": "* filter=evil\n", "code.txt": "code\n"})
    _arm(Path(inner.git("rev-parse", "--absolute-git-dir"), "config"), trap)
    inner_config = Path(world.lease_file("r1", "w1")["identity"]["admin_dir"]) / "modules/lib/config"
    assert "nested-fsmonitor" in inner_config.read_text()
    answer = world.freeze("r1", "w1")
    assert answer.code == 0, answer
    trap.assert_untouched()
    inner.write("code.txt", "late\n")
    answer = world.promote("r1")
    trap.assert_untouched()
    assert answer.json["records"][0]["promoted_commit"] == repo.head("work")
    assert repo.git("ls-tree", "work", "lib").split()[2] == tip


def test_the_callers_environment_does_not_lead_git_astray(world: World, repo: Repo, trap: Trap) -> None:
    """Cases 37 and 38: called from a hook, or with git's variables set, lionwt works in its own repository."""
    victim = world.repo("other")
    before = victim.snapshot()
    hostile: dict[str, str | None] = {
        "GIT_DIR": str(victim.path / ".git"),
        "GIT_WORK_TREE": str(trap.victim),
        "GIT_INDEX_FILE": str(victim.path / ".git/index"),
        "GIT_OBJECT_DIRECTORY": str(victim.path / ".git/objects"),
        "GIT_COMMON_DIR": str(victim.path / ".git"),
        "GIT_NAMESPACE": "evil",
        "GIT_EXTERNAL_DIFF": trap.canary("external-diff"),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": trap.canary("env-fsmonitor"),
        "GIT_CONFIG_PARAMETERS": f"'core.hookspath'='{trap.bin}'",
        "GIT_EDITOR": trap.canary("env-editor"),
        "GIT_PAGER": trap.canary("env-pager"),
        "GIT_SSH_COMMAND": trap.canary("env-ssh"),
        "GIT_TEMPLATE_DIR": str(trap.bin),
        "GIT_EXEC_PATH": str(trap.bin),
        "GIT_TRACE": str(world.root / "trace.log"),
    }
    lease = ("lease", "r1", "-w", "w1", "--target", "work", "--policy", "merge_validated", "--owner-pid", "none")
    assert world.lionwt(*lease, env=hostile).code == 0
    assert world.lionwt("start", "r1", "w1", env=hostile).code == 0
    (repo.path / ".worktrees/lionagi/r1/w1/new.txt").write_text("new\n")
    assert world.lionwt("freeze", "r1", "w1", "--succeeded", env=hostile).code == 0
    assert world.lionwt("promote", "r1", env=hostile).code == 0
    assert (repo.path / "new.txt").read_text() == "new\n"
    assert victim.snapshot() == before
    assert not (world.root / "trace.log").exists()
    trap.assert_untouched()


@pytest.mark.parametrize(
    ("root", "worker"),
    [("lionagi/runs/r1", "git"), ("lionagi/runs/r1", "workspaces.json"), ("lionagi", "runs"), ("repo/.git", "hooks")],
)
def test_no_artifact_path_reaches_lionwts_state_or_the_repository(
    world: World, repo: Repo, root: str, worker: str
) -> None:
    """Design section 3: what a worker is granted is its own; the private git directory never is."""
    state = world.state("r1")
    state.mkdir(parents=True)
    (state / "run.json").write_text(json.dumps({"run_id": "r1", "artifact_root": str(world.root / root)}))
    before = repo.snapshot()
    answer = world.lionwt("lease", "r1", "-w", worker, "--target", "work", "--json")
    assert (answer.code, answer.error) == (3, "path_unsafe"), answer
    assert worker in answer.json["error"]["message"]
    assert os.listdir(state) == ["run.json"] and repo.snapshot() == before


@pytest.mark.parametrize("entry", [".", "", "bin"])
def test_a_relative_entry_of_path_never_leads_into_the_worktree(world: World, repo: Repo, entry: str) -> None:
    """Invariant 22: git and what it starts stand in the worktree, where the worker's programs lie."""
    world.env["PATH"] = f"{entry}:{world.env['PATH']}"
    worker = world.lease("r1", "w1")["w1"]
    mark = world.root / "ran"
    for place in ("git", "bin/git"):
        worker.write(place, f"#!/bin/sh\ntouch {mark}\nexit 1\n")
        (worker.path / place).chmod(0o755)
    assert world.freeze("r1", "w1").code == 0
    assert world.promote("r1").code == 0
    assert not mark.exists()


@pytest.mark.parametrize("name", ["$(touch pwned)", " -rf ", "x: rm -rf kept", "it's;touch pwned;'", '"`touch pwned`'])
def test_shell_code_in_the_name_of_a_worker_s_directory_is_only_a_name_in_what_to_type(
    world: World, repo: Repo, name: str
) -> None:
    """What the operator is told to type does what it says, whatever a worker calls its files."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("kept", "kept\n")
    pipe = worker.path / name / ".gitignore"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    answer = world.freeze("r1", "w1")
    assert answer.error == "patch_missing", answer
    [command] = answer.json["next"]
    world.typed(command)
    assert not pipe.exists() and (worker.path / "kept").exists()
    assert world.freeze("r1", "w1").code == 0

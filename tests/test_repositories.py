"""Kinds of repositories and environments: what holds in a plain one holds in each of them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import LIONWT, Repo, World, assert_nothing_left, assert_sound, whole_life

HOOKS = """
applypatch-msg commit-msg fsmonitor-watchman post-applypatch post-checkout post-commit post-index-change post-merge
post-receive post-rewrite post-update pre-applypatch pre-auto-gc pre-commit pre-merge-commit pre-push pre-rebase
pre-receive prepare-commit-msg proc-receive push-to-checkout reference-transaction sendemail-validate update
"""
LEASE = ("lease", "r1", "-w", "w1", "--target", "work", "--policy", "merge_validated", "--owner-pid", "none", "--json")


def files_under(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*")) if path.exists() else []


def assert_nothing_made(world: World, repo: Repo, before: object) -> None:
    """A refused lease left the checkout, the git directory and the state as they were."""
    assert repo.snapshot() == before
    assert not (repo.path / ".worktrees").exists()
    assert repo.git("for-each-ref", "refs/heads/lionagi", "refs/lionwt") == ""
    assert not (world.state("r1") / "workspaces.json").exists()
    assert files_under(world.state("r1") / "git") == []
    assert [name for name in files_under(world.state("r1")) if name.endswith(".json")] == []


# ------------------------------------------------------------------ what the repository is made of


def sha256_packed(world: World) -> Repo:
    repo = world.repo(object_format="sha256")
    repo.git("tag", "-a", "-m", "tag", "v1")
    repo.git("pack-refs", "--all")
    repo.git("gc", "-q")
    return repo


def alternates_loose_and_packed(world: World) -> Repo:
    source = world.repo("source")
    source.git("gc", "-q")
    source.commit("loose", **{"f3.txt": "loose\n"})
    source.git("switch", "-q", "main")
    source.git("clone", "-q", "--shared", "--branch=work", ".", world.root / "repo")
    return Repo(world.root / "repo", world.git_environment())


def index_flavours(world: World) -> Repo:
    """Ways in which git keeps an index that is not the plain one; fsmonitor and a split one exclude each other."""
    fsmonitor = world.root / "fsmonitor"
    fsmonitor.write_text(f"#!/bin/sh\ntouch {world.root}/fsmonitor-ran-$LIONWT\nprintf 'token\\0/\\0'\n")
    fsmonitor.chmod(0o755)
    world.env["LIONWT"] = "by-lionwt"
    world.git_env["LIONWT"] = "by-operator"
    for key, value in (
        ("core.untrackedCache", "true"),
        ("core.preloadIndex", "true"),
        ("core.fsmonitor", str(fsmonitor)),
        ("index.version", "4"),
    ):
        world.config(key, value)
    repo = world.repo()
    repo.status()
    content = (repo.path / ".git/index").read_bytes()
    assert content[:8] == b"DIRC\0\0\0\4" and b"FSMN" in content and b"UNTR" in content
    assert list(world.root.glob("fsmonitor-ran-by-operator"))
    return repo


def split_index(world: World) -> Repo:
    world.config("core.splitIndex", "true")
    world.config("splitIndex.maxPercentChange", "100")
    repo = world.repo()
    repo.write("f3.txt", "more\n")
    repo.git("commit", "-qam", "on the split index")
    shared = repo.git("rev-parse", "--shared-index-path")
    assert (repo.path / shared).is_file()
    return repo


def shallow(depth: int) -> Callable[[World], Repo]:
    def make(world: World) -> Repo:
        source = world.repo("source")
        for number in range(4):
            source.commit(f"commit {number}", **{"f3.txt": f"{number}\n"})
        source.git("switch", "-q", "main")
        url = f"file://{source.path}"
        source.git("clone", "-q", f"--depth={depth}", "--branch=work", url, world.root / "repo")
        shutil.rmtree(source.path)
        return Repo(world.root / "repo", world.git_environment())

    return make


def partial_with_blobs(world: World) -> Repo:
    repo = partial_clone(world, "work")
    world.root.joinpath("source").rename(world.root / "unreachable")
    return repo


def partial_clone(world: World, branch: str) -> Repo:
    source = world.repo("source")
    source.git("config", "uploadpack.allowFilter", "true")
    source.git("switch", "-q", "main")
    source.commit("main goes on", **{"f1.txt": "only on main\n"})
    url = f"file://{source.path}"
    source.git("clone", "-q", "--filter=blob:none", f"--branch={branch}", url, world.root / "repo")
    return Repo(world.root / "repo", world.git_environment())


def submodule_of_another(world: World) -> Repo:
    world.repo("source").git("switch", "-q", "main")
    outer = world.repo("outer")
    outer.git("submodule", "--quiet", "add", "-b", "work", world.root / "source", "inner")
    outer.commit("with a submodule")
    return Repo(outer.path / "inner", world.git_environment())


def linked_worktree(world: World) -> Repo:
    """The operator works in a linked worktree; the main one is on another branch, with its own config."""
    main = world.repo("main-worktree")
    main.git("switch", "-q", "main")
    main.git("config", "extensions.worktreeConfig", "true")
    main.git("config", "--worktree", "core.pager", "cat")
    main.git("worktree", "add", "-q", world.root / "repo", "work")
    return Repo(world.root / "repo", world.git_environment())


def group_shared(world: World) -> Repo:
    repo = world.repo()
    repo.git("config", "core.sharedRepository", "group")
    for path in (repo.path / ".git", *(repo.path / ".git").rglob("*")):
        path.chmod(path.stat().st_mode | (0o2070 if path.is_dir() else 0o060))
    return repo


def sparse(*patterns: str, options: tuple[str, ...] = ()) -> Callable[[World], Repo]:
    def make(world: World) -> Repo:
        repo = world.repo()
        repo.commit("more", **{"seen/in.txt": "in\n", "new/old.txt": "old\n", "apart/x/far.txt": "far\n"})
        repo.git("sparse-checkout", "set", *options, *patterns)
        assert "S sub/dir/deep.txt" in repo.git("ls-files", "-t")
        return repo

    return make


KINDS: dict[str, Callable[[World], Repo]] = {
    "sha256, packed refs, gc": sha256_packed,
    "alternates": alternates_loose_and_packed,
    "index flavours": index_flavours,
    "split index": split_index,
    "shallow, depth 1": shallow(1),
    "shallow, depth 2": shallow(2),
    "partial clone with its blobs": partial_with_blobs,
    "submodule of another": submodule_of_another,
    "linked worktree": linked_worktree,
    "sparse checkout, cone": sparse("seen", options=("--cone",)),
    "sparse checkout, no cone": sparse("/*.txt", "!/f2.txt", "/seen/", options=("--no-cone",)),
    "sparse index": sparse("seen", options=("--cone", "--sparse-index")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_workers_live_and_land_in_a_repository_of_any_kind(world: World, kind: str) -> None:
    """Design 6: SHA-1 and SHA-256; packed refs; shallow clones work; the whole kind is handled."""
    repo = KINDS[kind](world)
    whole_life(world, repo)
    assert not (world.root / "fsmonitor-ran-by-lionwt").exists()


# ------------------------------------------------------------------ where it lies, and from where it is called


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_a_path_may_hold_spaces_quotes_newlines_and_bytes_that_are_no_text(world: World, locale: str) -> None:
    """Design 3 and 6: any path round-trips; bytes in and out; reached through a symlink and from a subdirectory."""
    odd = os.fsdecode(b"a b\t'q\"\\ \xc3\xa9 \xff #;[x]\nline $(x) %s")
    repo = world.repo(f"{odd}/repo")
    (world.root / "link").symlink_to(repo.path.parent)
    world.env |= {"LC_ALL": locale, "LANG": locale}
    whole_life(world, repo, cwd=world.root / "link" / "repo" / "sub" / "dir")


def test_lease_called_in_a_linked_worktree_pins_that_one_and_keeps_worktrees_under_the_main_one(world: World) -> None:
    """Design 3: the worktree lies in the main worktree; the run was opened in the linked one."""
    repo = linked_worktree(world)
    repo.write("sub/marker", "untracked, and the operator's\n")
    answer = world.lionwt(*LEASE, cwd=repo.path / "sub")
    assert answer.code == 0, answer
    run, lease = answer.json["run"], answer.json["leases"][0]
    assert (run["repository"], run["checkout"]) == (str(world.root / "main-worktree"), str(repo.path))
    assert lease["worktree_path"] == str(world.root / "main-worktree/.worktrees/lionagi/r1/w1")
    main = Repo(world.root / "main-worktree", world.git_environment())
    assert main.status() == ""
    Repo(Path(lease["worktree_path"]), world.git_environment()).write("f1.txt", "w1\n")
    assert world.lionwt("start", "r1", "w1").code == 0
    assert world.freeze("r1", "w1").code == 0
    # The main worktree on the same target as well: git would let one of them go stale.
    main.git("switch", "-q", "--ignore-other-worktrees", "work")
    blocked = world.promote("r1")
    assert (blocked.code, blocked.error) == (4, "checkout_blocked")
    assert str(main.path) in blocked.json["error"]["message"]
    assert main.head("work") == answer.json["run"]["base_sha"]
    main.git("switch", "-q", "main")
    assert world.promote("r1").code == 0
    assert (repo.path / "f1.txt").read_text() == "w1\n"
    assert (main.path / "f1.txt").read_text() != "w1\n"
    assert repo.status() == "?? sub/marker"
    assert main.status() == ""
    assert_nothing_left(world, main)


def test_an_environment_that_names_another_repository_is_ignored(world: World, repo: Repo) -> None:
    """Design 6: children get an environment built from nothing (case 37)."""
    other = world.repo("other")
    other.write("f1.txt", "staged\n")
    other.git("add", "f1.txt")
    before = other.snapshot()
    git_dir = str(other.path / ".git")
    world.env |= {
        "GIT_DIR": git_dir,
        "GIT_COMMON_DIR": git_dir,
        "GIT_WORK_TREE": str(other.path),
        "GIT_INDEX_FILE": f"{git_dir}/index",
        "GIT_OBJECT_DIRECTORY": f"{git_dir}/objects",
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": f"{git_dir}/objects",
        "GIT_PREFIX": "sub/",
        "GIT_NAMESPACE": "other",
        "GIT_CEILING_DIRECTORIES": str(repo.path),
        "GIT_CONFIG_PARAMETERS": "'core.bare'='true'",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.worktree",
        "GIT_CONFIG_VALUE_0": str(other.path),
        "GIT_REPLACE_REF_BASE": "refs/heads/",
        "GIT_LITERAL_PATHSPECS": "0",
        "GIT_ICASE_PATHSPECS": "1",
        "GIT_DEFAULT_HASH": "sha256",
        "GIT_TRACE": "1",
    }
    whole_life(world, repo, cwd=repo.path / "sub")
    assert other.snapshot() == before
    assert files_under(other.path / ".git/lionwt") == []


def test_a_linked_worktree_of_a_submodule_keeps_its_worktrees_in_the_submodules_own_checkout(world: World) -> None:
    """Case 46: git's own list takes the git directory's parent for the main worktree, which is wrong there."""
    inner = submodule_of_another(world)
    inner.git("switch", "-q", "main")
    inner.git("worktree", "add", "-q", world.root / "repo", "work")
    answer = world.lionwt(*LEASE)
    assert answer.code == 0, answer
    assert answer.json["run"]["checkout"] == str(world.root / "repo")
    assert answer.json["leases"][0]["worktree_path"] == str(inner.path / ".worktrees/lionagi/r1/w1")
    assert inner.status() == ""
    assert Repo(inner.path.parent, inner.env).status() == ""


def write_hook(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\nset -e\n{script}")
    path.chmod(0o755)


LIFE = """
env | grep ^GIT_ >"$OUT/$RUN.env" || true
cp "$GIT_INDEX_FILE" "$OUT/index.before" 2>/dev/null || true
lionwt lease $RUN -w w1 --target work --policy merge_validated --owner-pid none --json >"$OUT/$RUN.lease"
cmp "$GIT_INDEX_FILE" "$OUT/index.before" 2>/dev/null || test -z "$GIT_INDEX_FILE"
lionwt start $RUN w1
tree=$(dirname "$(pwd)")/main-worktree/.worktrees/lionagi/$RUN/w1
echo "from $RUN" >"$tree/$RUN.txt"
echo forced >"$tree/$RUN.log"
env -u GIT_DIR -u GIT_INDEX_FILE -u GIT_WORK_TREE git -C "$tree" add -f $RUN.log
lionwt freeze $RUN w1 --succeeded
"""


ELSEWHERE = """
lionwt lease elsewhere -w w1 --target work --repo "$OUT/other" --owner-pid none
"""


def test_a_life_inside_the_hooks_of_a_commit_and_of_a_push_acts_on_the_right_repository(world: World) -> None:
    """Design 6, case 38: lionwt works when called from a hook, with all that git exports there."""
    repo = linked_worktree(world)
    hooks = world.root / "main-worktree/.git/hooks"
    other = world.repo("other")
    remote = world.root / "remote.git"
    repo.git("init", "-q", "--bare", remote)
    env = {"PATH": f"{Path(LIONWT).parent}:{world.env['PATH']}", "OUT": str(world.root)}
    env["LIONAGI_HOME"] = world.env["LIONAGI_HOME"]
    repo.env.update(env)
    write_hook(hooks / "pre-commit", "export RUN=before" + LIFE)
    write_hook(hooks / "post-commit", "export RUN=after" + LIFE + "lionwt promote after\n" + ELSEWHERE)
    write_hook(hooks / "pre-push", "export RUN=push" + LIFE + "lionwt promote push\n")
    base = repo.head()
    # A partial commit: git gives the pre-commit hook an index of its own making.
    repo.write("f2.txt", "staged, not for this commit\n")
    repo.git("add", "f2.txt")
    repo.write("f1.txt", "committed\n")
    repo.git("commit", "-q", "-m", "operator", "--", "f1.txt")
    assert "GIT_INDEX_FILE=" in (world.root / "before.env").read_text()
    assert "next-index" in (world.root / "before.env").read_text()
    assert "GIT_DIR=" in (world.root / "before.env").read_text()
    assert repo.git("show", "HEAD:after.txt") == "from after"
    assert repo.git("show", "HEAD:after.log") == "forced"
    assert other.git("for-each-ref", "--format=%(refname:short)", "refs/heads/lionagi") == "lionagi/elsewhere/w1"
    assert repo.git("for-each-ref", "refs/heads/lionagi/elsewhere") == ""
    own = repo.head("HEAD^1")
    assert repo.head("HEAD^1^") == base
    assert repo.git("diff-tree", "--name-only", "-r", base, own) == "f1.txt"
    assert repo.status() == "M  f2.txt"
    repo.git("push", "-q", remote, "work:work")
    # What is pushed had been settled before the hook; what the hook landed is here.
    assert repo.git("ls-remote", remote, "refs/heads/work").split()[0] == repo.head("HEAD^1")
    assert (repo.path / "push.txt").read_text() == "from push\n"
    assert repo.status() == "M  f2.txt"
    # The one that was frozen inside pre-commit started from the base of then, so it waits for a person.
    moved = world.promote("before")
    assert (moved.code, moved.error) == (4, "target_moved")
    assert_nothing_left(world, Repo(world.root / "main-worktree", repo.env), "push")
    assert_sound(repo)


@pytest.mark.parametrize("where", ["repository", "global"])
def test_hooks_that_fail_or_hang_are_never_run(world: World, repo: Repo, where: str) -> None:
    """Design 6, cases 42 and 43: hooks nowhere; lease, freeze and promote do not even notice them."""
    ran = world.root / "ran"
    folder = repo.path / ".git/hooks" if where == "repository" else world.root / "hooks"
    ending = "exit 1" if where == "repository" else "exec sleep 1000"
    for name in HOOKS.split():
        write_hook(folder / name, f"echo {name} >>{ran}\n{ending}\n")
    if where == "global":
        world.config("core.hooksPath", str(folder))
    world.git_env |= {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.hooksPath",
        "GIT_CONFIG_VALUE_0": "/dev/null",
    }
    repo.env.update(world.git_env)
    whole_life(world, repo)
    assert not ran.exists()


# ------------------------------------------------------------------ who calls, and with what a process


def test_without_an_identity_the_commits_carry_lionwts_own(world: World, repo: Repo) -> None:
    """Design 7, case 77: no user.name and user.email anywhere, and user.useConfigOnly."""
    (world.home / ".gitconfig").write_text("[user]\n\tuseConfigOnly = true\n")
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    assert world.promote("r1").code == 0
    people = repo.git("log", "--format=%an <%ae> %cn <%ce>", f"{world.lease_file('r1', 'w1')['lease']['base_sha']}..")
    assert people.splitlines() == ["lionwt <lionwt@localhost> lionwt <lionwt@localhost>"] * 2
    assert_sound(repo)


@pytest.mark.parametrize(
    ("name", "email", "expected"),
    [
        ("Zoë <x>\nEvil", "zoë@example.invalid", "Zoë xEvil <zoë@example.invalid>"),
        ("...", "  ", "lionwt <lionwt@localhost>"),
    ],
)
def test_an_odd_identity_is_no_obstacle(world: World, repo: Repo, name: str, email: str, expected: str) -> None:
    """Design 7: the operator's identity as git would take it; where git would take none, lionwt's own."""
    world.config("user.name", name)
    world.config("user.email", email)
    world.lease("r1", "w1")["w1"].write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    assert world.promote("r1").code == 0
    assert repo.git("log", "-1", "--format=%an <%ae>") == expected
    assert_sound(repo)


def test_umask_077_makes_what_git_would_make_and_changes_no_mode_of_the_operators(world: World, repo: Repo) -> None:
    """Design 3: git children keep the caller's umask; the operator's files keep their modes."""
    exclude = repo.path / ".git/info/exclude"
    exclude.chmod(0o664)
    old = os.umask(0o077)
    try:
        workers = world.lease("r1", "w1")
        worker = workers["w1"]
        worker.write("new.txt", "new\n")
        assert world.freeze("r1", "w1").code == 0
        assert stat.S_IMODE((worker.path / "f1.txt").stat().st_mode) == 0o600
        assert world.promote("r1").code == 0
    finally:
        os.umask(old)
    assert stat.S_IMODE(exclude.stat().st_mode) == 0o664
    assert stat.S_IMODE((repo.path / "new.txt").stat().st_mode) == 0o600
    assert stat.S_IMODE((repo.path / "f1.txt").stat().st_mode) == 0o644
    assert repo.status() == ""


def test_a_repository_shared_with_a_group_stays_shared(world: World) -> None:
    """Design 6: core.sharedRepository is taken into the private directory; case of umask 077 beside it."""
    repo = group_shared(world)
    old = os.umask(0o077)
    try:
        whole_life(world, repo)
    finally:
        os.umask(old)
    own = repo.path / ".git/lionwt"
    narrow = [
        str(path.relative_to(repo.path))
        for path in (repo.path / ".git").rglob("*")
        if path != own
        and own not in path.parents
        # git itself makes objects read-only for everybody.
        and not path.stat().st_mode & (0o070 if path.is_dir() else 0o040)
    ]
    assert narrow == []
    assert (repo.path / ".git/index").stat().st_mode & 0o060 == 0o060
    assert (repo.path / ".git/refs/heads/work").stat().st_mode & 0o060 == 0o060


def test_a_lease_from_a_directory_that_is_gone_says_so(world: World, repo: Repo) -> None:
    """Case 66: a removed current directory is an answer, not a crash; with --repo it does not matter."""
    gone = world.root / "gone"
    gone.mkdir()
    script = f'cd {gone} && rmdir {gone} && exec "$@"'
    command = ["bash", "-c", script, "bash", LIONWT, *LEASE]
    before = repo.snapshot()
    done = subprocess.run(command, env=world.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2, done
    assert "current directory has been removed" in done.stdout
    assert done.stderr == ""
    assert_nothing_made(world, repo, before)
    gone.mkdir()
    done = subprocess.run([*command, "--repo", repo.path], env=world.environment(), capture_output=True, check=False)
    assert done.returncode == 0, done
    gone.mkdir()
    start = ["bash", "-c", script, "bash", LIONWT, "start", "r1", "w1"]
    assert subprocess.run(start, env=world.environment(), capture_output=True, check=False).returncode == 0
    gone.mkdir()
    relative = [*start[:5], "start", "./r1", "w1"]
    done = subprocess.run(relative, env=world.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "current directory has been removed" in done.stderr


def test_home_may_be_unset(world: World, repo: Repo) -> None:
    """Design 3: LIONAGI_HOME is enough; git then has no global configuration."""
    del world.env["HOME"]
    world.lease("r1", "w1")["w1"].write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    assert world.promote("r1").code == 0
    assert repo.git("log", "-1", "--format=%an") == "lionwt"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_obstacle(world: World, repo: Repo, closed: str) -> None:
    """Design 5: the exit code says what happened, whatever became of the streams."""
    script = f'"$@" {closed}'
    command = ["bash", "-c", script, "bash", LIONWT]
    for arguments, code in ((LEASE, 0), (LEASE, 3), (("start", "r1", "w1"), 0), (("start",), 2)):
        done = subprocess.run(
            [*command, *arguments],
            cwd=repo.path,
            env=world.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, (arguments, done)
        assert "Traceback" not in done.stderr
    assert world.lease_file("r1", "w1")["lease"]["state"] == "running"
    assert repo.git("fsck", "--strict") == ""


def test_an_answer_that_cannot_be_written_is_reported_and_what_was_done_stands(world: World, repo: Repo) -> None:
    """Design 5: a full disk behind stdout is a failure of the system (exit 8), without a traceback."""
    for arguments, code in ((LEASE, 8), (("start", "r1", "w1", "--json"), 8), (("start", "r1", "w9", "--json"), 3)):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [LIONWT, *arguments],
                cwd=repo.path,
                env=world.environment(),
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == code, (arguments, done)
        assert "Traceback" not in done.stderr
        assert "No space left on device" in done.stderr
        assert len(done.stderr.splitlines()) <= 2, done.stderr
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [LIONWT, "--version"], env=world.environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert "Traceback" not in done.stderr
    assert done.returncode == 8
    assert world.lease_file("r1", "w1")["lease"]["state"] == "running"


# ------------------------------------------------------------------ what is refused


def test_a_bare_repository_is_refused(world: World) -> None:
    """Design 6: a bare repository is refused, also behind a linked worktree (case 46)."""
    source = world.repo("source")
    source.git("clone", "-q", "--bare", ".", world.root / "bare.git")
    bare = Repo(world.root / "bare.git", world.git_environment())
    bare.git("worktree", "add", "-q", world.root / "repo", "work")
    for place in (bare.path, bare.path / "refs", world.root / "repo"):
        before = files_under(world.root)
        answer = world.lionwt(*LEASE, cwd=place)
        assert (answer.code, answer.error) == (3, "repository_unsupported"), (place, answer)
        assert "nothing was made" in answer.json["error"]["message"]
        assert answer.json["error"]["hint"]
        assert files_under(world.root) == before


def test_a_repository_without_commits_is_refused(world: World) -> None:
    """Design 6, case 60: an unborn repository is refused."""
    repo = Repo(world.root / "repo", world.git_environment())
    repo.path.mkdir()
    repo.git("init", "-q", "-b", "work")
    for target in ("work", "HEAD", "main"):
        before = files_under(world.root)
        answer = world.lionwt("lease", "r1", "-w", "w1", "--target", target, "--json")
        assert (answer.code, answer.error) == (3, "repository_unsupported"), answer
        assert files_under(world.root) == before


def test_no_repository_and_the_inside_of_a_git_directory_are_refused(world: World, repo: Repo) -> None:
    """Design 6: discovery answers clearly where there is nothing to work in."""
    outside = world.root / "outside"
    outside.mkdir()
    (world.root / "broken").mkdir()
    (world.root / "broken/.git").write_text("gitdir: /nowhere\n")
    before = repo.snapshot()
    for place in (outside, repo.path / ".git", repo.path / ".git/refs", world.root / "broken"):
        answer = world.lionwt(*LEASE, cwd=place)
        assert (answer.code, answer.error) == (3, "repository_unsupported"), (place, answer)
        assert answer.json["error"]["hint"]
        assert_nothing_made(world, repo, before)


@pytest.mark.skipif(os.geteuid() != 0, reason="chown needs root")
def test_a_repository_of_somebody_else_is_refused_with_gits_own_words(world: World, repo: Repo) -> None:
    """Case 81: git's message is passed on, and what to type next."""
    before = repo.snapshot()
    for path in (repo.path, *repo.path.rglob("*")):
        os.chown(path, 12345, 12345, follow_symlinks=False)
    answer = world.lionwt(*LEASE)
    assert (answer.code, answer.error) == (8, "git_failed")
    assert "dubious ownership" in answer.json["error"]["message"]
    assert "safe.directory" in answer.json["error"]["hint"]
    world.config("safe.directory", str(repo.path))
    assert_nothing_made(world, repo, before)
    # The operator's answer to the hint is honoured.
    assert world.lionwt(*LEASE).code == 0


def test_a_git_that_is_too_old_or_missing_is_refused(world: World, repo: Repo) -> None:
    """Design 6: git 2.38 or newer is checked once, with a clear error."""
    fake = world.root / "bin/git"
    write_hook(fake, f"touch {world.root}/ran-$1\n[ $1 = version ] || exit 99\necho git version 2.30.0\n")
    fake.write_text(fake.read_text().replace("$1", "${@: -1}"))
    before = repo.snapshot()
    old = world.lionwt(*LEASE, env={"PATH": f"{fake.parent}:{world.env['PATH']}"})
    assert (old.code, old.error) == (8, "git_unsupported")
    assert "2.30.0" in old.json["error"]["message"] and "2.38" in old.json["error"]["message"]
    assert [path.name for path in world.root.glob("ran-*")] == ["ran-version"]
    none = world.lionwt(*LEASE, env={"PATH": "/nowhere"})
    assert (none.code, none.error) == (8, "git_unsupported")
    assert "PATH" in none.json["error"]["hint"]
    assert_nothing_made(world, repo, before)
    world.lease("r1", "w1")
    lease = (world.state("r1") / "workspaces/w1.json").read_bytes()
    gone = world.lionwt("freeze", "r1", "w1", "--succeeded", "--json", env={"PATH": "/nowhere"})
    assert (gone.code, gone.error) == (8, "git_unsupported")
    assert (world.state("r1") / "workspaces/w1.json").read_bytes() == lease


def test_a_partial_clone_that_lacks_blobs_and_its_remote_is_refused_and_undone(world: World) -> None:
    """Design 6, case 56: what is missing in a partial clone fails clearly; nothing is left."""
    repo = partial_clone(world, "work")
    repo.git("branch", "-q", "other", "origin/main")
    (world.root / "source").rename(world.root / "unreachable")
    whole = repo.path / ".git/info/exclude"
    whole.write_text(whole.read_text() + "/.worktrees/\n")
    before = repo.snapshot()
    answer = world.lionwt("lease", "r1", "-w", "w1", "-w", "w2", "--target", "other", "--json")
    assert (answer.code, answer.error) == (8, "git_failed")
    error = answer.json["error"]
    assert "partial clone" in error["message"] and "nothing was made" in error["message"], error
    assert_nothing_made(world, repo, before)
    assert_nothing_left(world, repo)
    # What the hint says helps, once the remote is back.
    (world.root / "unreachable").rename(world.root / "source")
    subprocess.run(error["hint"].partition(": ")[2], shell=True, env=repo.env, check=True, capture_output=True)
    (world.root / "source").rename(world.root / "unreachable")
    assert world.lionwt("lease", "r1", "-w", "w1", "--target", "other", "--json").code == 0


def test_two_thousand_refs_cost_no_git_process_more(world: World) -> None:
    """Design 11: what a life costs does not grow with what else the repository holds."""
    real = shutil.which("git", path=world.env["PATH"])
    counter = world.root / "bin/git"
    count = world.root / "count"
    write_hook(counter, f'echo >>{count}\nexec {real} "$@"\n')
    costs = []
    for name, refs in (("few", 0), ("many", 1000)):
        repo = world.repo(name)
        both = [f"refs/{kind}/{number}" for number in range(refs) for kind in ("heads/x", "remotes/origin")]
        stdin = "".join(f"create {ref} HEAD\n" for ref in both).encode()
        subprocess.run(["git", "update-ref", "--stdin"], input=stdin, cwd=repo.path, env=repo.env, check=True)
        count.write_text("")
        plain, world.env["PATH"] = world.env["PATH"], f"{counter.parent}:{world.env['PATH']}"
        before = sum(os.times()[2:4])
        worker = world.lease(name, "w1", cwd=repo.path)["w1"]
        worker.commit("worker", **{"f1.txt": "one\n"})
        assert world.freeze(name, "w1").code == 0
        assert world.promote(name).code == 0
        world.env["PATH"] = plain
        costs.append((len(count.read_text()), sum(os.times()[2:4]) - before))
    (few, few_seconds), (many, many_seconds) = costs
    assert few == many > 10
    assert many_seconds < 2 * few_seconds


def test_a_landing_that_died_is_finished_as_sparse_as_the_checkout_is(world: World) -> None:
    """Design 7 (promote 6) and 8: finished forward, and only what the operator has checked out appears."""
    repo = sparse("seen", options=("--cone",))(world)
    worker = world.lease("r1", "w1")["w1"]
    worker.write("sub/dir/deep.txt", "deeper\n")
    worker.write("apart/new.txt", "new\n")
    worker.write("seen/in.txt", "inner\n")
    worker.git("rm", "-q", "new/old.txt")
    assert world.freeze("r1", "w1").code == 0
    died = world.lionwt("promote", "r1", env={"LIONWT_FAULT": "promote.moved:kill"})
    assert died.code == -9
    assert world.promote("r1").code == 0
    assert repo.status() == ""
    assert files_under(repo.path / "sub") == files_under(repo.path / "apart") == []
    assert (repo.path / "seen/in.txt").read_text() == "inner\n"
    assert {"S sub/dir/deep.txt", "S apart/new.txt"} < set(repo.git("ls-files", "-t").splitlines())
    assert repo.git("diff", "--cached", "HEAD") == ""
    assert_nothing_left(world, repo)


def test_an_edit_behind_an_index_flag_survives_a_landing_and_its_repair(world: World, repo: Repo) -> None:
    """Invariant 14: what the operator hid with skip-worktree or assume-unchanged is the operator's all the same."""
    repo.git("update-index", "--skip-worktree", "f1.txt")
    repo.git("update-index", "--assume-unchanged", "f2.txt")
    repo.write("f2.txt", "local\n")
    worker = world.lease("r1", "w1")["w1"]
    worker.write("f1.txt", "landed\n")
    worker.write("f2.txt", "landed\n")
    assert world.freeze("r1", "w1").code == 0
    before = repo.snapshot()
    blocked = world.promote("r1")
    assert (blocked.code, blocked.error) == (4, "checkout_blocked")
    assert "f2.txt" in blocked.json["error"]["message"]
    assert repo.snapshot() == before
    repo.git("update-index", "--no-assume-unchanged", "f2.txt")
    repo.git("checkout", "-q", "f2.txt")
    assert world.lionwt("promote", "r1", env={"LIONWT_FAULT": "promote.moved:kill"}).code == -9
    repo.write("f1.txt", "local\n")
    behind = world.promote("r1")
    assert (behind.code, behind.error) == (4, "checkout_behind")
    assert "f1.txt" in behind.json["error"]["message"]
    assert (repo.path / "f1.txt").read_text() == "local\n"
    assert (repo.path / "f2.txt").read_text() == "landed\n"
    assert "S f1.txt" in repo.git("ls-files", "-t")


# ------------------------------------------------------------------ submodules of the operator's


def commit_in(repo: Repo, name: str) -> str:
    return repo.commit(name, **{f"{name}.txt": f"{name}\n"})


@pytest.mark.parametrize("initialised", [False, True])
def test_a_submodule_of_the_operators_is_bumped_in_the_tree_and_left_alone_on_disk(
    world: World, initialised: bool
) -> None:
    """Design 7: the gitlink lands like any entry; the submodule's checkout is the operator's."""
    source = world.repo("source")
    old = source.head()
    new = commit_in(source, "newer")
    repo = world.repo()
    repo.git("submodule", "--quiet", "add", source.path, "lib")
    inner = Repo(repo.path / "lib", repo.env)
    inner.git("checkout", "-q", old)
    repo.commit("with a submodule")
    if initialised:
        inner.write("f1.txt", "edited by the operator\n")
        inner.write("untracked", "by the operator\n")
    else:
        repo.git("submodule", "--quiet", "deinit", "-f", "lib")
    kept = {name: (repo.path / "lib" / name).read_bytes() for name in files_under(repo.path / "lib") if name != "sub"
            and not (repo.path / "lib" / name).is_dir()}  # fmt: skip
    workers = world.lease("r1", "w1", "w2", "w3")
    for worker in workers.values():
        assert worker.status() == ""
    # One without a checkout of the submodule, one with: new work in it is no commit of the main store.
    workers["w1"].git("update-index", "--cacheinfo", f"160000,{new},lib")
    workers["w1"].git("commit", "-q", "-m", "bump")
    workers["w2"].git("submodule", "--quiet", "update", "--init")
    workers["w2"].write("f2.txt", "two\n")
    Repo(workers["w2"].path / "lib", repo.env)
    workers["w3"].git("submodule", "--quiet", "update", "--init")
    commit_in(Repo(workers["w3"].path / "lib", repo.env), "conflicting")
    Repo(workers["w3"].path / "lib", repo.env).git("branch", "brånch")
    for name in workers:
        assert world.freeze("r1", name).code == 0
    [submodule] = world.manifest("r1", "w3")["submodules"]
    assert submodule["bundle"] is not None
    assert world.promote("r1", "w1").code == 0
    assert repo.git("ls-tree", "HEAD", "lib").split()[2] == new
    assert world.promote("r1", "w2").code == 0
    assert (repo.path / "f2.txt").read_text() == "two\n"
    conflict = world.promote("r1", "w3")
    assert (conflict.code, conflict.error) == (4, "merge_conflict")
    assert "lib" in conflict.json["error"]["message"]
    now = {name: (repo.path / "lib" / name).read_bytes() for name in kept}
    assert now == kept
    if initialised:
        assert inner.head() == old
        assert repo.git("status", "--porcelain", "--ignore-submodules=dirty") == " M lib"
    else:
        assert repo.status() == ""
        assert files_under(repo.path / "lib") == []
    assert_nothing_left(world, repo)
    assert_sound(repo)


# ------------------------------------------------------------------ file systems that are full, apart or read-only


def mounts() -> bool:
    if os.geteuid() != 0 or not shutil.which("mount"):
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small(world: World) -> Iterator[Callable[[str, str], Path]]:
    """Makes small file systems of their own; all are unmounted at the end."""
    if not mounts():
        pytest.skip("mounting needs root")
    made: list[Path] = []

    def mount(name: str, size: str) -> Path:
        path = world.root / name
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "tmpfs", path], check=True)
        made.append(path)
        return path

    yield mount
    for path in reversed(made):
        subprocess.run(["umount", "-l", path], check=True)


def fill(path: Path, leaving: int = 0) -> Path:
    """Fill a small file system up to ``leaving`` bytes; returns the file to delete."""
    filler = path / "filler"
    seen = os.statvfs(path)
    with open(filler, "wb", buffering=0) as file:
        try:
            wanted = max(seen.f_bavail * seen.f_frsize - leaving, 0)
            while wanted > 0:
                wanted -= file.write(bytes(min(wanted, 1 << 16)))
            while not leaving:
                file.write(bytes(512))
        except OSError:
            pass
    return filler


def assert_no_space(answer: object, code: str = "no_space") -> None:
    assert (answer.code, answer.error) == (8, code), answer  # type: ignore[attr-defined]
    assert "space" in answer.json["error"]["hint"], answer  # type: ignore[attr-defined]


def test_a_full_state_file_system_loses_nothing_and_goes_on_after_space_is_freed(
    world: World, repo: Repo, small: Callable[[str, str], Path]
) -> None:
    """Design 5 and 7: exit 8 no_space at every verb, nothing changed; the state may lie on another file system."""
    home = small("lionagi", "4m")
    exclude = repo.path / ".git/info/exclude"
    exclude.write_text(exclude.read_text() + "/.worktrees/\n")
    before = repo.snapshot()
    filler = fill(home)
    assert_no_space(world.lionwt(*LEASE))
    assert_nothing_made(world, repo, before)
    filler.unlink()
    worker = world.lease("r1", "w1", start=False)["w1"]
    file = world.state("r1") / "workspaces/w1.json"
    lease = file.read_bytes()
    filler = fill(home)
    assert_no_space(world.lionwt("start", "r1", "w1", "--json"))
    assert_no_space(world.lionwt("lease", "r1", "-w", "w2", "--json"))
    assert file.read_bytes() == lease
    assert not (world.state("r1") / "workspaces/w2.json").exists()
    filler.unlink()
    assert world.lionwt("start", "r1", "w1").code == 0
    worker.write("new.txt", "new\n")
    lease = file.read_bytes()
    filler = fill(home)
    assert_no_space(world.freeze("r1", "w1"))
    assert file.read_bytes() == lease
    assert worker.status() == "?? new.txt"
    filler.unlink()
    assert world.freeze("r1", "w1").code == 0
    lease = file.read_bytes()
    filler = fill(home)
    assert_no_space(world.promote("r1"))
    assert file.read_bytes() == lease
    assert repo.head("work") == repo.head("main")
    assert repo.status() == ""
    assert not (repo.path / ".git/index.lock").exists()
    filler.unlink()
    assert world.promote("r1").code == 0
    assert (repo.path / "new.txt").read_text() == "new\n"
    assert_nothing_left(world, repo)


def test_a_full_repository_loses_nothing_and_goes_on_after_space_is_freed(
    world: World, small: Callable[[str, str], Path]
) -> None:
    """Design 5 and 7, case 52: no_space is undone before the commit point, and finished forward after it."""
    volume = small("volume", "16m")
    repo = world.repo("volume/repo")
    repo.commit("big", **{"big.bin": "".join(f"{number:08x}\n" for number in range(100_000))})
    exclude = repo.path / ".git/info/exclude"
    exclude.write_text(exclude.read_text() + "/.worktrees/\n")
    before = repo.snapshot()
    for leaving in (0, 400_000):
        filler = fill(volume, leaving)
        assert_no_space(world.lionwt(*LEASE, cwd=repo.path))
        filler.unlink()
        assert_nothing_made(world, repo, before)
    worker = world.lease("r1", "w1", cwd=repo.path)["w1"]
    content = os.urandom(3 << 20)
    worker.write("new.bin", content)
    file = world.state("r1") / "workspaces/w1.json"
    lease = file.read_bytes()
    filler = fill(volume)
    assert_no_space(world.freeze("r1", "w1"))
    assert file.read_bytes() == lease
    filler.unlink()
    assert worker.status() == "?? new.bin"
    assert world.freeze("r1", "w1").code == 0
    lease, before = file.read_bytes(), repo.snapshot()
    filler = fill(volume)
    assert_no_space(world.promote("r1"))
    assert file.read_bytes() == lease
    assert repo.snapshot() == before
    filler.unlink()
    # Enough for the commit and the ref, not for the file: past the commit point.
    filler = fill(volume, 1 << 20)
    for _ in range(2):
        answer = world.promote("r1")
        assert_no_space(answer)
        merge = repo.head("work")
        assert f"'work' was moved to {merge}" in answer.json["error"]["message"]
    assert repo.head(f"{merge}^1") == world.lease_file("r1", "w1")["lease"]["base_sha"]
    assert world.lease_file("r1", "w1")["intent"]["landing"]["merge"] == merge
    filler.unlink()
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert repo.head("work") == merge == answer.json["records"][0]["promoted_commit"]
    assert (repo.path / "new.bin").read_bytes() == content
    assert repo.status() == ""
    assert_nothing_left(world, repo)
    assert_sound(repo)


def test_an_artifact_root_on_a_read_only_file_system_is_refused_and_serves_when_writable_again(
    world: World, repo: Repo, small: Callable[[str, str], Path]
) -> None:
    """Design 3 and 5: run.json decides artifact_root, wherever that lies; no permission is exit 8."""
    artifacts = small("artifacts", "8m")
    state = world.state("r1")
    state.mkdir(parents=True)
    (state / "run.json").write_text(f'{{"run_id": "r1", "artifact_root": "{artifacts}"}}')
    remount = ["mount", "-o"]
    before = repo.snapshot()
    subprocess.run([*remount, "remount,ro", artifacts], check=True)
    refused = world.lionwt(*LEASE)
    assert (refused.code, refused.error) == (8, "permission")
    assert str(artifacts) in refused.json["error"]["message"]
    assert repo.snapshot() == before
    assert repo.git("for-each-ref", "refs/heads/lionagi") == ""
    assert files_under(state / "workspaces") == [".run.lock", ".w1.lock"]
    subprocess.run([*remount, "remount,rw", artifacts], check=True)
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    lease = (state / "workspaces/w1.json").read_bytes()
    subprocess.run([*remount, "remount,ro", artifacts], check=True)
    refused = world.freeze("r1", "w1")
    assert (refused.code, refused.error) == (8, "permission")
    assert (state / "workspaces/w1.json").read_bytes() == lease
    assert worker.status() == "?? new.txt"
    subprocess.run([*remount, "remount,rw", artifacts], check=True)
    assert world.freeze("r1", "w1").code == 0
    assert (artifacts / ".lionwt/w1/candidate.patch").stat().st_size > 0
    assert stat.S_IMODE((artifacts / ".lionwt/w1/candidate.patch").stat().st_mode) == 0o600
    assert world.promote("r1").code == 0
    assert_nothing_left(world, repo)


def test_a_ref_that_is_locked_leaves_no_trace_of_the_attempt(world: World, repo: Repo) -> None:
    """Invariant 13: a promotion that could not move the ref leaves the checkout byte-identical."""
    world.lease("r1", "w1")["w1"].write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    lock = repo.path / ".git/refs/heads/work.lock"
    lock.touch()
    before = repo.snapshot()
    refused = world.promote("r1")
    assert (refused.code, refused.error) == (8, "git_failed")
    assert "work.lock" in refused.json["error"]["message"]
    assert repo.snapshot() == before
    assert world.lease_file("r1", "w1")["intent"] is None
    lock.unlink()
    assert world.promote("r1").code == 0
    assert repo.status() == ""
    assert_nothing_left(world, repo)

"""The operator's checkout: what is theirs survives every landing, whatever comes between."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Repo, World, answer_of, go_on, wait_until

Do = Callable[[Repo], object]


def of_the_operator(repo: Repo) -> dict[str, object]:
    """Everything that is the operator's own: status, both diffs, index entries with flags, and the files."""
    files = {}
    for parent, directories, names in os.walk(repo.path):
        directories[:] = [name for name in directories if name not in (".git", ".worktrees")]
        for name in [*names, *directories]:
            path = Path(parent, name)
            content: object = None
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = path.read_bytes()
            files[str(path.relative_to(repo.path))] = (path.lstat().st_mode, content)
    status = repo.git("status", "--porcelain=v1", "--ignored", "--untracked-files=all")
    return {
        "status": [line for line in status.splitlines() if ".worktrees/" not in line],
        "unstaged": repo.git("diff", "--binary", "--full-index"),
        "staged": repo.git("diff", "--cached", "--binary", "--full-index"),
        "files": files,
    }


def test_everything_of_the_operator_survives_twenty_landings(world: World, repo: Repo) -> None:
    """Invariant 14: the operator's dirty, untracked and ignored files survive everything, staged as they were."""
    mine = [f"m{number}.txt" for number in range(9)]
    repo.commit("more", **{name: f"{name}\n" * 9 for name in mine}, **{f"t{n}.txt": "old\n" for n in range(20)})
    world.frozen("r1", {f"w{n:02}": {f"t{n}.txt": f"new {n}\n", f"add/{n}.txt": f"{n}\n"} for n in range(20)})
    repo.write("m0.txt", "unstaged\n")
    repo.write("m1.txt", "staged\n")
    repo.git("add", "m1.txt")
    repo.write("m2.txt", "staged first\n")
    repo.git("add", "m2.txt")
    repo.write("m2.txt", "and edited again\n")
    (repo.path / "m3.txt").chmod(0o755)
    (repo.path / "m4.txt").chmod(0o755)
    repo.git("add", "m4.txt")
    repo.git("rm", "-q", "--cached", "m5.txt")
    (repo.path / "m6.txt").unlink()
    repo.git("update-index", "--skip-worktree", "m7.txt")
    repo.write("m7.txt", "hidden edit\n")
    repo.git("update-index", "--assume-unchanged", "m8.txt")
    repo.write("m8.txt", "assumed unchanged\n")
    repo.write("staged-new.txt", "staged new\n")
    repo.git("add", "staged-new.txt")
    repo.write("intended.txt", "intent to add\n")
    repo.git("add", "-N", "intended.txt")
    repo.write("untracked/deep/file.txt", b"\0untracked\r\n")
    repo.write("build.log", "ignored\n")
    repo.write("ignored/cache.bin", b"\xff\0")
    repo.write("add/mine.txt", "untracked beside what is landed\n")
    (repo.path / "link").symlink_to("/nowhere")
    os.mkfifo(repo.path / "fifo")
    before = of_the_operator(repo)
    index = repo.git("ls-files", "-s", "-v", "--", *mine, "staged-new.txt", "intended.txt")
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert len(repo.merges()) == 20
    after = of_the_operator(repo)
    landed = {f"t{n}.txt" for n in range(20)} | {f"add/{n}.txt" for n in range(20)}
    assert {k: v for k, v in after.pop("files").items() if k not in landed} == {  # type: ignore[attr-defined]
        k: v
        for k, v in before.pop("files").items()  # type: ignore[attr-defined]
        if k not in landed
    }
    assert after == before
    assert repo.git("ls-files", "-s", "-v", "--", *mine, "staged-new.txt", "intended.txt") == index
    for number in range(20):
        assert (repo.path / f"t{number}.txt").read_text() == f"new {number}\n"
        assert (repo.path / f"add/{number}.txt").read_text() == f"{number}\n"


# --- files in the way -----------------------------------------------------------------------------


def replace_dir_by_file(worker: Repo) -> None:
    (worker.path / "dir" / "inner.txt").unlink()
    (worker.path / "dir").rmdir()
    worker.write("dir", "a file now\n")


def flagged(flag: str, name: str) -> Do:
    def do(repo: Repo) -> None:
        repo.git("update-index", flag, name)
        repo.write(name, "mine\n")

    return do


def unflag(flag: str, name: str) -> Do:
    def do(repo: Repo) -> None:
        repo.git("update-index", flag, name)
        repo.git("checkout", "-q", "--", name)

    return do


def staged(name: str) -> Do:
    def do(repo: Repo) -> None:
        repo.write(name, "mine\n")
        repo.git("add", name)

    return do


def restored(name: str) -> Do:
    return lambda repo: repo.git("restore", "--staged", "--worktree", "--", name)


def removed(name: str) -> Do:
    return lambda repo: (repo.path / name).unlink()


def force_added(name: str) -> Do:
    def do(worker: Repo) -> None:
        worker.write(name, "theirs\n")
        worker.git("add", "-f", name)

    return do


def link_parent(repo: Repo) -> None:
    repo.write("ignored/elsewhere/x.log", "mine\n")
    (repo.path / "parent").symlink_to("ignored/elsewhere")


def put_dir_in_place(repo: Repo) -> None:
    repo.write("place/mine.txt", "mine\n")


def take_dir_away(repo: Repo) -> None:
    (repo.path / "place" / "mine.txt").unlink()
    (repo.path / "place").rmdir()


def intend(repo: Repo) -> None:
    repo.write("intended.txt", "mine\n")
    repo.git("add", "-N", "intended.txt")


def no_intent(repo: Repo) -> None:
    repo.git("rm", "-q", "--cached", "intended.txt")
    (repo.path / "intended.txt").unlink()


#: What the worker did, what the operator has there, and how it is cleared.
IN_THE_WAY: dict[str, tuple[Do, Do, Do]] = {
    "modified": (lambda w: w.write("t0.txt", "new\n"), lambda r: r.write("t0.txt", "mine\n"), restored("t0.txt")),
    "staged": (lambda w: w.write("t1.txt", "new\n"), staged("t1.txt"), restored("t1.txt")),
    "deleted-by-both-ways": (removed("t2.txt"), lambda r: r.write("t2.txt", "mine\n"), restored("t2.txt")),
    "removed": (lambda w: w.write("t3.txt", "new\n"), removed("t3.txt"), restored("t3.txt")),
    "mode": (lambda w: w.write("t4.txt", "new\n"), lambda r: (r.path / "t4.txt").chmod(0o755), restored("t4.txt")),
    "skipped": (
        lambda w: w.write("t5.txt", "new\n"),
        flagged("--skip-worktree", "t5.txt"),
        unflag("--no-skip-worktree", "t5.txt"),
    ),
    "assumed": (
        lambda w: w.write("t6.txt", "new\n"),
        flagged("--assume-unchanged", "t6.txt"),
        unflag("--no-assume-unchanged", "t6.txt"),
    ),
    "untracked": (lambda w: w.write("new.txt", "new\n"), lambda r: r.write("new.txt", "mine\n"), removed("new.txt")),
    "ignored": (force_added("new.log"), lambda r: r.write("new.log", "mine\n"), removed("new.log")),
    "ignored-deep": (
        force_added("ignored/a/new.txt"),
        lambda r: r.write("ignored/a/new.txt", "mine\n"),
        removed("ignored/a/new.txt"),
    ),
    "directory": (lambda w: w.write("place", "file\n"), put_dir_in_place, take_dir_away),
    "file-above": (lambda w: w.write("above/x.txt", "x\n"), lambda r: r.write("above", "mine\n"), removed("above")),
    "ignored-within": (replace_dir_by_file, lambda r: r.write("dir/keep.log", "mine\n"), removed("dir/keep.log")),
    "linked-parent": (lambda w: w.write("parent/x.txt", "x\n"), link_parent, removed("parent")),
    "intended": (lambda w: w.write("intended.txt", "new\n"), intend, no_intent),
    "link": (
        lambda w: w.write("slot.txt", "new\n"),
        lambda r: (r.path / "slot.txt").symlink_to("/nowhere"),
        removed("slot.txt"),
    ),
}


def test_what_is_in_the_way_of_one_landing_stops_that_one_only(world: World, repo: Repo) -> None:
    """Design 7, promote 5: exit 4, pending, the candidate stays frozen, nothing touched; it lands when cleared."""
    repo.commit("more", **{f"t{n}.txt": "old\n" for n in range(8)}, **{"dir/inner.txt": "inner\n"})
    leased = world.lease("r1", "free-a", *IN_THE_WAY, "free-z")
    for worker, (theirs, _, _) in IN_THE_WAY.items():
        theirs(leased[worker])
    for worker in ("free-a", "free-z"):
        leased[worker].write(f"{worker}.txt", "free\n")
    for worker in leased:
        world.freeze_now("r1", worker)
    for _, mine, _ in IN_THE_WAY.values():
        mine(repo)
    before, leases = of_the_operator(repo), world.state_bytes("r1")
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "checkout_blocked"), answer
    assert {entry["worker_id"]: entry["code"] for entry in answer.json["pending"]} == dict.fromkeys(
        IN_THE_WAY, "checkout_blocked"
    )
    assert [record["status"] for record in answer.json["records"]] == ["promoted", "promoted"]
    after, free = of_the_operator(repo), {"free-a.txt", "free-z.txt"}
    after["files"] = {k: v for k, v in after["files"].items() if k not in free}  # type: ignore[attr-defined]
    assert after == before
    now = world.state_bytes("r1")
    assert all(now[f"{worker}.json"] == leases[f"{worker}.json"] for worker in IN_THE_WAY)
    assert not list((repo.path / ".git").glob("*.lock")) and not list((repo.path / ".git").glob("lionwt-*"))
    for _, _, clear in IN_THE_WAY.values():
        clear(repo)
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert len(repo.merges()) == len(leased) and repo.status() == ""
    assert (repo.path / "dir").read_text() == "a file now\n" and not (repo.path / "t2.txt").exists()
    assert (repo.path / "ignored/elsewhere/x.log").read_text() == "mine\n"


def test_everything_in_the_way_is_named_at_once_in_plain_words(world: World, repo: Repo) -> None:
    """House style: what happened, what was left untouched, what to type next; never one file at a time."""
    repo.commit("more", **{f"t{n:02}.txt": "old\n" for n in range(14)})
    few, many = world.lease("r1", "few", "many").values()
    for name in ("t00.txt", "t01.txt", "t02.txt"):
        few.write(name, "new\n")
    for n in range(3, 14):
        many.write(f"t{n:02}.txt", "new\n")
    many.write("new.txt", "new\n")
    for worker in ("few", "many"):
        world.freeze_now("r1", worker)
    repo.write("t00.txt", "mine\n")
    repo.write("t01.txt", "mine\n")
    repo.git("add", "t01.txt")
    removed("t02.txt")(repo)
    error = world.promote("r1", "few").json["error"]
    assert error["code"] == "checkout_blocked"
    assert error["message"] == (
        f"3 files of yours are in the way in {repo.path}: 't00.txt' (not committed), 't01.txt' (not committed), "
        "'t02.txt' (removed, not committed); nothing was changed and the candidate stays frozen"
    )
    put_aside = error["hint"].partition(": ")[2]
    assert put_aside == f"git -C {repo.path} stash push -- t00.txt t01.txt t02.txt"
    for n in range(3, 14):
        repo.write(f"t{n:02}.txt", "mine\n")
    repo.write("new.txt", "mine\n")
    error = world.promote("r1", "many").json["error"]
    assert error["message"].startswith(
        f"12 files of yours are in the way in {repo.path}: 'new.txt' (not tracked), 't03"
    )
    assert "'t11.txt' (not committed) and 2 more; nothing was changed" in error["message"]
    for line in ("Cannot merge", "not uptodate", "would be overwritten"):
        assert line not in error["message"]
    for n in range(3, 14):
        repo.git("restore", f"t{n:02}.txt")
    subprocess.run(put_aside, shell=True, check=True, capture_output=True, env=repo.env)
    assert world.promote("r1", "few").code == 0
    repo.git("stash", "drop", "-q")


def test_a_checkout_without_executable_bits_or_links_is_judged_as_the_operator_s_git_does(
    world: World, repo: Repo
) -> None:
    """What git status calls clean is in nobody's way, and what lands there is clean again."""
    (repo.path / "link").symlink_to("f1.txt")
    repo.commit("a link and a tool", **{"tool": "old\n", "m.txt": "old\n"})
    world.frozen("r0", {"real": {"f3.txt": "new\n"}})
    changed, link, gone = world.lease("r1", "changed", "link", "gone").values()
    changed.write("f1.txt", "new\n")
    (changed.path / "tool").chmod(0o755)  # the bit alone
    link.git("rm", "-q", "link")
    (link.path / "link").symlink_to("f2.txt")
    (link.path / "another").symlink_to("sub")
    gone.git("rm", "-q", "f3.txt")
    for worker in ("changed", "link", "gone"):
        world.freeze_now("r1", worker)
    (repo.path / "f3.txt").chmod(0o755)
    assert world.promote("r0").error == "checkout_blocked"  # where modes count, this one is the operator's edit
    repo.git("config", "core.fileMode", "false")
    world.config("core.symlinks", "false")
    (repo.path / "link").unlink()
    repo.git("checkout", "--", "link")
    for name in ("f1.txt", "tool", "m.txt"):
        (repo.path / name).chmod(0o755)
    assert repo.status() == "" and not (repo.path / "link").is_symlink()
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert repo.status() == "" and len(repo.merges()) == 3
    modes = dict(
        reversed(row.split(" ", 1))
        for row in repo.git("ls-tree", "--format=%(objectmode) %(path)", "work").splitlines()
    )
    assert (modes["f1.txt"], modes["tool"], modes["m.txt"]) == ("100644", "100755", "100644")
    assert (modes["link"], modes["another"]) == ("120000", "120000") and "f3.txt" not in modes
    assert os.access(repo.path / "tool", os.X_OK) and os.access(repo.path / "m.txt", os.X_OK)
    assert (repo.path / "link").read_text() == "f2.txt" and (repo.path / "another").read_text() == "sub"
    for name in ("link", "another"):
        assert not (repo.path / name).is_symlink()
    repo.write("link", "mine")
    assert repo.status() == " M link"


def test_a_landing_that_died_in_a_checkout_without_links_and_modes_is_repaired(world: World, repo: Repo) -> None:
    """Design 8: what holds the old or the new version is known by what the operator's own git looks at."""
    (repo.path / "link").symlink_to("f1.txt")
    repo.commit("a link")
    (worker,) = world.lease("r1", "w1").values()
    worker.git("rm", "-q", "link")
    (worker.path / "link").symlink_to("f2.txt")
    worker.write("f1.txt", "new\n")
    world.freeze_now("r1", "w1")
    repo.git("config", "core.fileMode", "false")
    repo.git("config", "core.symlinks", "false")
    (repo.path / "link").unlink()
    repo.git("checkout", "--", "link")
    (repo.path / "f1.txt").chmod(0o755)
    world.lionwt("promote", "r1", "--json", env={"LIONWT_FAULT": "promote.moved:kill"})
    answer = world.lionwt("reconcile", "r1", "--takeover", "--json")
    assert (answer.code, answer.json["findings"]) == (0, []), answer
    assert repo.status() == "" and (repo.path / "link").read_text() == "f2.txt"
    assert (repo.path / "f1.txt").read_text() == "new\n"


# --- a checkout that is not ready -------------------------------------------------------------------


def elsewhere(repo: Repo) -> None:
    repo.git("worktree", "add", "-q", "-f", repo.path.parent / "elsewhere", "work")


def not_elsewhere(repo: Repo) -> None:
    repo.git("worktree", "remove", repo.path.parent / "elsewhere")


def failing(*arguments: str) -> Do:
    def do(repo: Repo) -> None:
        assert repo.run_git(*arguments, check=False).returncode != 0

    return do


NOT_READY: dict[str, tuple[Do, Do, str]] = {
    "another branch": (lambda r: r.git("switch", "-q", "topic"), lambda r: r.git("switch", "-q", "work"), "topic"),
    "detached": (
        lambda r: r.git("switch", "-q", "--detach"),
        lambda r: r.git("switch", "-q", "work"),
        "detached HEAD",
    ),
    "mid-merge": (
        lambda r: r.git("merge", "-q", "--no-commit", "--no-ff", "-X", "ours", "topic"),
        lambda r: r.git("merge", "--abort"),
        "a merge",
    ),
    "mid-cherry-pick": (
        failing("cherry-pick", "topic"),
        lambda r: r.git("cherry-pick", "--abort"),
        "a cherry-pick",
    ),
    "mid-revert": (failing("revert", "--no-edit", "main"), lambda r: r.git("revert", "--abort"), "a revert"),
    "mid-rebase": (
        failing("rebase", "topic", "other"),
        lambda r: (r.git("rebase", "--abort"), r.git("switch", "-q", "work")),
        "a rebase",
    ),
    "mid-bisect": (lambda r: r.git("bisect", "start"), lambda r: r.git("bisect", "reset"), "a bisect"),
    "checked out elsewhere": (elsewhere, not_elsewhere, "elsewhere as well"),
    "index locked": (
        lambda r: r.write(".git/index.lock", b"held"),
        lambda r: (r.path / ".git" / "index.lock").unlink(),
        "index.lock",
    ),
}


def test_a_checkout_that_is_not_ready_is_waited_for(world: World, repo: Repo) -> None:
    """ADR-0091 D4, condition 4, and design 7, promote 5: exit 4, everything byte-identical, lands afterwards."""
    repo.git("switch", "-q", "main")
    repo.commit("for the revert", **{"f1.txt": "main\n"})
    repo.git("branch", "-f", "work")
    repo.git("switch", "-q", "-c", "topic")
    repo.commit("topic", **{"f1.txt": "topic\n"})
    repo.git("switch", "-q", "-c", "other", "main")
    repo.commit("other", **{"f1.txt": "other\n"})
    repo.git("switch", "-q", "work")
    repo.commit("work", **{"f1.txt": "work\n"})
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    for what, (make, clear, said) in NOT_READY.items():
        make(repo)
        before, leases = repo.snapshot(), world.state_bytes("r1")
        answer = world.promote("r1")
        assert (answer.code, answer.error) == (4, "checkout_blocked"), (what, answer)
        assert said in answer.json["error"]["message"], answer
        assert answer.json["error"]["hint"] and answer.json["records"] == []
        assert (repo.snapshot(), world.state_bytes("r1")) == (before, leases), what
        clear(repo)
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert len(repo.merges()) == 1 and repo.status() == "" and (repo.path / "new.txt").exists()


def test_unmerged_paths_without_an_operation_are_in_the_way_too(world: World, repo: Repo) -> None:
    """Design 7, promote 5: an index that holds conflicts (a stash that did not apply) is left as it is."""
    repo.write("f1.txt", "stashed\n")
    repo.git("stash", "-q")
    repo.commit("mine", **{"f1.txt": "committed\n"})
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    assert repo.run_git("stash", "pop", check=False).returncode == 1
    before, leases = repo.snapshot(), world.state_bytes("r1")
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "checkout_blocked"), answer
    assert (repo.snapshot(), world.state_bytes("r1")) == (before, leases)
    error = answer.json["error"]
    assert "1 conflict" in error["message"] and "'f1.txt'" in error["message"], error
    assert answer.json["next"] == [f"git -C {repo.path} status"]
    back = error["hint"].partition("(")[2].partition(")")[0]
    subprocess.run(back, shell=True, check=True, env=repo.env)
    assert world.promote("r1").code == 0 and repo.status() == ""


def test_an_edit_that_git_was_told_not_to_see_is_named_with_the_way_to_see_it(world: World, repo: Repo) -> None:
    """What git status does not show cannot be committed or stashed before it does."""
    names = {"assumed": ("--assume-unchanged",), "skipped": ("--skip-worktree",)}
    names["both"] = names["assumed"] + names["skipped"]
    repo.commit("more", **dict.fromkeys([*names, "same"], "old\n"))
    world.frozen("r1", {"w1": dict.fromkeys([*names, "same"], "new\n")})
    for name, flags in names.items():
        for flag in flags:
            repo.git("update-index", flag, name)
        repo.write(name, "mine\n")
    repo.git("update-index", "--skip-worktree", "same")
    assert repo.status() == ""
    error = world.promote("r1").json["error"]
    assert error["message"].startswith(f"3 files of yours are in the way in {repo.path}: 'assumed' (edited, but git"), (
        error
    )
    subprocess.run(error["hint"].rpartition(": ")[2], shell=True, check=True, env=repo.env)
    assert repo.status().split() == ["M", "assumed", "M", "both", "M", "skipped"]
    repo.git("stash", "-q")
    assert world.promote("r1").code == 0
    assert repo.git("ls-files", "-v", "same").startswith("S ")


def test_a_broken_index_is_named_and_left(world: World, repo: Repo) -> None:
    """The operator's own index is named, not the copy of it that a landing works on."""
    world.frozen("r1", {"w1": {"new.txt": "new\n"}})
    index = repo.path / ".git" / "index"
    index.write_bytes(b"garbage")
    leases = world.state_bytes("r1")
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "checkout_blocked"), answer
    error = answer.json["error"]
    assert f"{index} cannot be read" in error["message"] and f"{index.parent}/lionwt-" not in error["message"], error
    assert (index.read_bytes(), world.state_bytes("r1")) == (b"garbage", leases)
    subprocess.run(error["hint"].rpartition(": ")[2], shell=True, check=True, env=repo.env)
    assert world.promote("r1").code == 0 and repo.status() == ""


def test_a_landing_brings_a_linked_and_sparse_checkout_forward(world: World, repo: Repo) -> None:
    """Design 7, promote 5 and 6: the checkout is the worktree of the run; what sparse leaves out stays out."""
    repo.git("switch", "-q", "main")
    linked = Repo(world.root / "linked", repo.env)
    repo.git("worktree", "add", "-q", linked.path, "work")
    linked.git("sparse-checkout", "set", "--no-cone", "/*", "!/sub/", "!/f3.txt")
    assert not (linked.path / "sub").exists()
    linked.write("mine.txt", "mine\n")
    leased = world.lease("r1", "w1", cwd=linked.path)
    for name in ("f1.txt", "f3.txt", "sub/dir/deep.txt", "sub/new.txt"):
        leased["w1"].write(name, "new\n")
    world.freeze_now("r1", "w1")
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert (linked.path / "f1.txt").read_text() == "new\n" and linked.status() == "?? mine.txt"
    assert linked.git("show", "work:sub/dir/deep.txt") == "new"
    assert not (linked.path / "f3.txt").exists() and not (linked.path / "sub" / "dir" / "deep.txt").exists()
    assert repo.status() == "" and repo.head() == repo.head("main")


@pytest.mark.parametrize("definition", [("--cone", "sub/dir"), ("--no-cone", "/*", "!/out/")], ids=["cone", "patterns"])
def test_what_is_new_in_a_directory_that_is_left_out_stays_out_too(
    world: World, repo: Repo, definition: tuple[str, ...]
) -> None:
    """Design 7, promote 6: also where the landing changes every file that the index leaves out."""
    repo.commit("left out", **{"out/old.txt": "old\n"})
    repo.git("sparse-checkout", "set", *definition)
    world.frozen("r1", {"w1": {"out/old.txt": "newer\n", "out/new.txt": "new\n", "sub/dir/new.txt": "new\n"}})
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert not (repo.path / "out").exists() and (repo.path / "sub/dir/new.txt").exists() and repo.status() == ""
    assert repo.git("ls-files", "-t", "out").split() == ["S", "out/new.txt", "S", "out/old.txt"]


def test_directories_that_hold_nothing_make_room_for_a_file(world: World, repo: Repo) -> None:
    """Design 7, promote 5: git minds no empty directory, however deep."""
    world.frozen("r1", {"w1": {"room": "new\n"}})
    (repo.path / "room/with/nothing").mkdir(parents=True)
    (repo.path / "room/else").mkdir()
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert (repo.path / "room").read_text() == "new\n" and repo.status() == ""


@pytest.mark.parametrize("target", ["/etc", "nowhere"])
def test_an_ignored_link_in_a_directory_that_is_to_be_a_file_is_in_the_way(
    world: World, repo: Repo, target: str
) -> None:
    """Invariant 14: a link to a directory is a file of the operator's like any other."""
    worker = world.lease("r1", "w1")["w1"]
    shutil.rmtree(worker.path / "sub")
    worker.write("sub", "a file now\n")
    world.freeze_now("r1", "w1")
    (repo.path / "sub/dir/mine.log").symlink_to(target)
    before = repo.head("work")
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "checkout_blocked"), answer
    assert "mine.log" in answer.json["error"]["message"]
    assert repo.head("work") == before and (repo.path / "sub/dir/mine.log").is_symlink()


# --- forced interleavings ----------------------------------------------------------------------------


def test_no_git_of_the_operator_comes_between_ref_and_checkout(world: World, repo: Repo) -> None:
    """Design 7, promote 6: the index lock is held, so no commit can come between; case 70."""
    world.frozen("r1", {"w1": {"f1.txt": "new\n", "new.txt": "new\n"}})
    repo.git("branch", "other")
    repo.write("mine.txt", "mine\n")
    repo.write("f2.txt", "edited\n")
    landing = world.stopped_at("promote.moved", "promote", "r1", "--json")
    assert len(repo.merges()) == 1 and "line 0" in (repo.path / "f1.txt").read_text()
    for command in (
        ("add", "mine.txt"),
        ("commit", "-q", "-a", "-m", "between"),
        ("checkout", "-q", "other"),
        ("stash", "-q"),
        ("reset", "-q", "--hard"),
        ("rm", "-q", "--cached", "f3.txt"),
    ):
        refused = repo.run_git(*command, check=False)
        assert refused.returncode != 0, (command, refused)
        assert b"index.lock" in refused.stderr or command[0] == "stash", (command, refused)
    assert repo.git("stash", "list") == ""
    answer = go_on(landing)
    assert answer.code == 0, answer
    repo.git("add", "mine.txt")
    repo.git("commit", "-q", "-m", "after")
    assert repo.git("diff", "--name-status", "HEAD~1", "HEAD") == "A\tmine.txt"
    assert (repo.path / "f1.txt").read_text() == "new\n" and repo.status() == " M f2.txt"
    assert world.leftovers("r1", repo) == []


def test_a_file_that_comes_into_the_way_at_the_last_moment_is_left(world: World, repo: Repo) -> None:
    """Design 7, promote 6: the landing is done, exit 4 checkout_behind says which file was left."""
    world.frozen("r1", {"w1": {"f1.txt": "new\n", "new.txt": "new\n", "f2.txt": "new\n", "sub/dir/deep.txt": "new\n"}})
    landing = world.stopped_at("promote.intended", "promote", "r1", "--json")
    repo.write("f1.txt", "edited at the last moment\n")
    repo.write("new.txt", "mine\n")
    answer = go_on(landing)
    assert (answer.code, answer.error) == (4, "checkout_behind"), answer
    record = world.record("r1", "w1")
    assert (record["status"], record["promoted_commit"]) == ("promoted", repo.head("work"))
    assert "f1.txt" in answer.json["error"]["message"]
    assert (repo.path / "f1.txt").read_text() == "edited at the last moment\n"
    assert (repo.path / "new.txt").read_text() == "mine\n"
    assert (repo.path / "f2.txt").read_text() == (repo.path / "sub/dir/deep.txt").read_text() == "new\n"
    assert sorted(repo.status().splitlines()) == [" M f1.txt", " M new.txt"]
    assert world.promote("r1").code == 4 and world.leftovers("r1", repo) == []


def test_a_commit_made_just_before_the_lock_is_never_lost(world: World, repo: Repo) -> None:
    """ADR-0091 D4, condition 5: the head is compared once more under the lock; target_moved, nothing lost."""
    world.frozen("r1", {"w1": {"f1.txt": "new\n"}})
    fifo = world.root / "fifo"
    os.mkfifo(fifo)
    hook = repo.write(".git/hooks/pre-commit", f"#!/bin/sh\ncat {fifo}\n")
    hook.chmod(0o755)
    repo.write("f1.txt", "mine\n")
    with contextlib.ExitStack() as stack:
        commit = stack.enter_context(git_child(repo, "commit", "-q", "-a", "-m", "mine"))
        wait_until((repo.path / ".git" / "index.lock").exists)
        landing = world.popen("promote", "r1", "--json")
        wait_until(lambda: list((repo.path / ".git").glob("lionwt-*")) or landing.poll() is not None)
        fifo.write_text("go")
        assert commit.wait(30) == 0
        answer = answer_of(landing)
    assert (answer.code, answer.error) == (4, "target_moved"), answer
    assert repo.git("log", "-1", "--format=%s") == "mine" and repo.merges() == []
    assert (repo.path / "f1.txt").read_text() == "mine\n" and repo.status() == ""
    assert world.leftovers("r1", repo) == []


@contextlib.contextmanager
def git_child(repo: Repo, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["git", *arguments], cwd=repo.path, env=repo.env, stdout=subprocess.DEVNULL)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def test_the_promotion_lock_outlives_a_killed_lionwt_until_its_git_has_ended(world: World, repo: Repo) -> None:
    """Design 3, locks: the children that move and update inherit the promotion lock's descriptor."""
    fifo, started = world.root / "fifo", world.root / "started"
    os.mkfifo(fifo)
    script = world.root / "smudge"
    script.write_text(f"#!/bin/sh\ntouch {started}\ncat {fifo} >/dev/null\ncat\n")
    script.chmod(0o755)
    repo.git("config", "--global", "filter.slow.smudge", str(script))
    repo.commit("attributes", **{".gitattributes": "*.slow filter=slow\n"})
    world.frozen("r1", {"w1": {"a.slow": "content\n", "b.txt": "b\n"}})
    started.unlink(missing_ok=True)
    landing = world.popen("promote", "r1", "--json")
    wait_until(lambda: started.exists() or landing.poll() is not None)
    landing.kill()
    landing.wait(30)
    answer = answer_of(world.popen("promote", "r1", "--json", "--lock-timeout", "0"))  # bounded, should it hang
    assert (answer.code, answer.error) == (6, "lock_timeout"), answer
    fifo.write_text("go")
    wait_until(lambda: (repo.path / "a.slow").exists())
    keeper = os.open(fifo, os.O_RDWR)  # whatever smudges now is not kept waiting
    try:
        os.write(keeper, b"go")
        script.write_text("#!/bin/sh\ncat\n")
        answer = world.promote("r1")
    finally:
        os.close(keeper)
    assert answer.code == 0, answer
    assert len(repo.merges()) == 1 and repo.status() == "" and (repo.path / "a.slow").read_text() == "content\n"
    assert world.leftovers("r1", repo) == []


# --- interruptions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("point", ["promote.index_locked", "promote.intended", "promote.moved", "teardown.trashed"])
def test_a_signal_ends_promote_in_a_state_that_is_whole(world: World, repo: Repo, number: int, point: str) -> None:
    """Design 5: 128+n; before the move everything is taken back, after it the landing is finished first."""
    world.frozen("r1", {"w1": {"f1.txt": "new\n", "new.txt": "new\n"}})
    repo.write("f2.txt", "mine\n")
    before, lease = repo.snapshot(), world.lease_file("r1", "w1")
    landing = world.stopped_at(point, "promote", "r1", "--json")
    answer = go_on(landing, number)
    assert answer.code == 128 + number, answer
    assert not (repo.path / ".git" / "index.lock").exists()
    if point in ("promote.index_locked", "promote.intended"):
        assert repo.snapshot() == before
        now = world.lease_file("r1", "w1")
        assert {**now, "serial": 0} == {**lease, "serial": 0}
    else:
        assert repo.status() == " M f2.txt" and (repo.path / "new.txt").exists()
    assert world.promote("r1").code == 0
    assert len(repo.merges()) == 1 and repo.status() == " M f2.txt"
    assert world.leftovers("r1", repo) == []


@pytest.mark.parametrize("action", ["kill", "raise"])
@pytest.mark.parametrize(
    "point",
    [
        "promote.index_locked",
        "promote.intended",
        "promote.moved",
        "promote.updated",
        "promote.index_renamed",
        "promote.landed",
    ],
)
def test_a_landing_that_dies_at_any_step_is_finished_exactly_once(
    world: World, repo: Repo, point: str, action: str
) -> None:
    """Invariants 11 and 20: killed anywhere and promoted again it has landed once, and nothing is left over."""
    repo.commit("more", **{"gone.txt": "gone\n", "dir/inner.txt": "inner\n"})
    leased = world.lease("r1", "w1")
    for name in ("f1.txt", "new.txt", "dir2/new.txt"):
        leased["w1"].write(name, "new\n")
    (leased["w1"].path / "gone.txt").unlink()
    replace_dir_by_file(leased["w1"])
    (leased["w1"].path / "f3.txt").chmod(0o755)
    world.freeze_now("r1", "w1")
    repo.write("f2.txt", "mine\n")
    repo.write("staged.txt", "staged\n")
    repo.git("add", "staged.txt")
    died = world.promote("r1", env={"LIONWT_FAULT": f"{point}:{action}"})
    assert died.code == (-9 if action == "kill" else 1), died
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert [record["status"] for record in answer.json["records"]] == ["promoted"]
    record = world.record("r1", "w1")
    assert repo.merges() == [record["promoted_commit"]] and repo.head() == record["promoted_commit"]
    assert record["worktree_removed"] and record["branch_deleted"] and record["teardown_errors"] == []
    assert repo.status().splitlines() == [" M f2.txt", "A  staged.txt"]
    assert (repo.path / "f2.txt").read_text() == "mine\n"
    assert (repo.path / "f3.txt").stat().st_mode & 0o111
    assert world.leftovers("r1", repo) == []


def test_a_torn_checkout_is_repaired_and_what_the_operator_wrote_since_is_not(world: World, repo: Repo) -> None:
    """Design 8: forward, and only where the file holds the old, the new, or a torn prefix of the new."""
    new = "new line\n" * 100
    world.frozen("r1", {"w1": dict.fromkeys(("f1.txt", "f2.txt", "f3.txt", "a/new.txt", "b/new.txt", "c.txt"), new)})
    assert world.promote("r1", env={"LIONWT_FAULT": "promote.moved:kill"}).code == -9
    repo.write("f1.txt", new[:17])  # torn
    repo.write("a/new.txt", "")  # torn at once
    repo.write("f2.txt", new)  # finished
    repo.write("b/new.txt", "mine\n")
    repo.write("f3.txt", "line 0 of 3, edited\n")
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "checkout_behind"), answer
    for name in ("f1.txt", "f2.txt", "a/new.txt", "c.txt"):
        assert (repo.path / name).read_text() == new, name
    assert (repo.path / "b/new.txt").read_text() == "mine\n"
    assert (repo.path / "f3.txt").read_text() == "line 0 of 3, edited\n"
    assert sorted(repo.status().splitlines()) == [" M b/new.txt", " M f3.txt"]
    assert world.leftovers("r1", repo) == []


def test_a_lock_of_the_operator_s_git_is_never_taken_for_lionwt_s(world: World, repo: Repo) -> None:
    """Design 7, promote 6: the lock is journalled by inode; another one there belongs to a git of the operator's."""
    world.frozen("r1", {"w1": {"f1.txt": "new\n"}})
    assert world.promote("r1", env={"LIONWT_FAULT": "promote.index_renamed:kill"}).code == -9
    lock = repo.path / ".git" / "index.lock"
    lock.unlink(missing_ok=True)
    lock.write_bytes(b"half an index")
    entries = repo.git("ls-files", "-s")
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "checkout_blocked"), answer
    assert lock.read_bytes() == b"half an index" and repo.git("ls-files", "-s") == entries
    lock.unlink()
    assert world.promote("r1").code == 0
    assert len(repo.merges()) == 1 and repo.status() == "" and world.leftovers("r1", repo) == []


def test_another_run_leaves_the_lock_of_an_interrupted_landing(world: World, repo: Repo) -> None:
    """Design 7, promote 6: a crash leaves the lock, and everybody is refused until that run is settled."""
    world.frozen("r1", {"w1": {"f1.txt": "new\n"}})
    world.frozen("r2", {"w1": {"f2.txt": "new\n"}})
    assert world.promote("r1", env={"LIONWT_FAULT": "promote.intended:kill"}).code == -9
    before = repo.snapshot()
    answer = world.promote("r2")
    assert (answer.code, answer.error) == (4, "checkout_blocked"), answer
    assert str(world.state("r1")) in answer.json["error"]["hint"]
    assert repo.snapshot() == before
    assert world.promote("r1").code == 0
    assert len(repo.merges()) == 1 and repo.status() == ""


@pytest.mark.parametrize("point", ["promote.index_linked", "promote.index_locked"])
@pytest.mark.parametrize("ending", ["patch_only", "target_moved", "patch_changed"])
def test_an_index_lock_from_before_the_intent_goes_with_whatever_ending_comes(
    world: World, repo: Repo, ending: str, point: str
) -> None:
    """Design section 7, promote 6: git refuses until the run is finished, and not for ever."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    assert world.promote("r1", env={"LIONWT_FAULT": f"{point}:kill"}).code == -9
    assert (repo.path / ".git" / "index.lock").exists()
    arguments = ["promote", "r1"]
    if ending == "patch_only":
        arguments += ["--policy", "patch_only"]
    elif ending == "target_moved":
        moved = repo.git("commit-tree", "-p", "HEAD", "-m", "moved", "HEAD^{tree}")
        repo.git("update-ref", "refs/heads/work", moved)
    else:
        (world.evidence("r1", "w1") / "candidate.patch").write_bytes(b"changed")
    world.lionwt(*arguments)
    assert world.record("r1", "w1")["status"] in ("discarded", "needs_resolution")
    assert world.leftovers("r1", repo) == []


def test_nothing_of_the_index_lock_is_left_where_its_settlement_died_as_well(world: World, repo: Repo) -> None:
    """Invariant 20: neither the copies nor the name under which the second lock was made."""
    world.frozen("r1", {"w1": {"f1.txt": "new\n"}})
    for point in ("promote.index_renamed", "promote.index_linked"):
        assert world.promote("r1", env={"LIONWT_FAULT": f"{point}:kill"}).code == -9
    answer = world.lionwt("reconcile", "r1", "--takeover")
    assert (answer.code, world.record("r1", "w1")["status"]) == (0, "promoted"), answer
    assert len(repo.merges()) == 1 and repo.status() == "" and world.leftovers("r1", repo) == []


def test_what_to_type_works_in_a_repository_below_a_directory_with_a_space_and_a_quote(world: World) -> None:
    """Design 5: an error says what to type next, and that can be typed."""
    world.lionagi_home = world.root / "the lion's home"
    world.env["LIONAGI_HOME"] = str(world.lionagi_home)
    repo = world.repo("it's a place/the repo")
    world.frozen("r1", {"w1": {"f2.txt": "worker\n"}, "w2": {"f2.txt": "other\n"}}, cwd=repo.path)

    def told(worker: str, code: str) -> None:
        answer = world.promote("r1", worker, cwd=repo.path)
        assert (answer.code, answer.error) == (4, code), answer
        for command in answer.json["next"]:
            world.typed(command, check=code != "merge_conflict")  # git apply --3way says with its status: conflicts
        assert len(answer.json["next"]) == 1

    repo.git("switch", "-q", "main")
    told("w1", "checkout_blocked")
    repo.git("switch", "-q", "--detach")
    told("w1", "checkout_blocked")
    assert repo.git("symbolic-ref", "HEAD") == "refs/heads/work"
    repo.write("f2.txt", "the operator's\n")
    told("w1", "checkout_blocked")
    repo.write(".git/index.lock", "held")
    told("w1", "checkout_blocked")
    assert world.promote("r1", "w1", cwd=repo.path).code == 0
    assert repo.git("stash", "list").count("stash@") == 1
    told("w2", "merge_conflict")
    assert "<<<<<<< " in (repo.path / "f2.txt").read_text()

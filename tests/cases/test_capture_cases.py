"""Captures that lost work or took in too much, each driven through lionwt as it was reported."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Repo, World, files_of, unprivileged


def changed(world: World, worker: str = "w1") -> list[str]:
    return list(world.lease_file("r1", worker)["candidate"]["files_changed"])


def patch(world: World, worker: str = "w1") -> bytes:
    return (world.evidence("r1", worker) / "candidate.patch").read_bytes()


# --- settings that hide or spoil -----------------------------------------------------------------

#: What the operator, or a worker in the shared configuration, may have set for its own eyes.
DIFF = [
    "diff.noprefix=true", "diff.mnemonicPrefix=true", "diff.srcPrefix=x/", "diff.dstPrefix=y/", "diff.external=false",
    "diff.algorithm=patience", "diff.context=0", "diff.interHunkContext=9", "diff.renames=copies",
    "diff.renameLimit=1", "diff.orderFile=ORDER", "diff.submodule=log", "diff.ignoreSubmodules=all",
    "diff.suppressBlankEmpty=true", "diff.indentHeuristic=false", "diff.relative=true", "diff.colorMoved=zebra",
    "diff.wsErrorHighlight=all", "diff.statGraphWidth=1", "diff.trustExitCode=true", "diff.noindex=true",
    "color.ui=always", "color.diff=always", "core.quotePath=true", "core.abbrev=4", "core.whitespace=cr-at-eol",
    "core.pager=false", "apply.whitespace=fix", "apply.ignoreWhitespace=change", "diff.tool.binary=true",
    "diff.odd.textconv=false", "diff.odd.binary=true", "diff.odd.command=false", "diff.odd.xfuncname=[",
    "core.bigFileThreshold=1", "core.compression=0", "core.attributesFile=ATTRIBUTES",
]  # fmt: skip
#: What makes git look away from files, or from their modes.
HIDING = [
    "status.showUntrackedFiles=no", "core.fileMode=false", "core.symlinks=false", "core.untrackedCache=true",
    "core.ignoreStat=true", "core.checkStat=minimal", "core.trustctime=false", "core.ignoreCase=true",
    "core.precomposeUnicode=true", "core.protectNTFS=true", "core.protectHFS=true", "core.preloadIndex=false",
    "core.sparseCheckout=true", "core.sparseCheckoutCone=true", "feature.manyFiles=true", "index.version=4",
    "index.threads=1", "index.skipHash=true", "status.submoduleSummary=true", "status.renames=copies",
    "submodule.recurse=true", "submodule.lib.ignore=all", "add.ignoreErrors=true", "commit.cleanup=strip",
    "commit.template=missing", "commit.status=false", "i18n.commitEncoding=latin1", "core.excludesFile=EXCLUDES",
]  # fmt: skip


@pytest.mark.parametrize("who", ["operator", "operator-in-the-repository", "worker"])
def test_no_setting_for_the_eyes_reaches_patch_or_capture(world: World, repo: Repo, who: str) -> None:
    """A patch without prefixes, in colour or reordered did not apply; a status that shows nothing hid the work.

    Design 6: content work runs in the private git directory, which takes none of these settings.
    """
    (world.root / "order").write_text("z*\n")
    (world.root / "excludes").write_text("*\n")
    (world.root / "attributes").write_text("*.odd diff=odd\n")
    values = {"ORDER": "order", "EXCLUDES": "excludes", "ATTRIBUTES": "attributes"}
    repo.commit("odd", **{"a.odd": "one\n", "blank.txt": "a\n\nb\n\n\n", "run.sh": "#!/bin/sh\n"})

    def configure(where: Repo, scope: str) -> None:
        for setting in (*DIFF, *HIDING):
            key, _, value = setting.partition("=")
            # Attributes of a worker's are no settings for the eyes: they have a test of their own.
            where.git("config", scope, key, str(world.root / values[value]) if value in values else value)

    if who.startswith("operator"):
        configure(repo, "--global" if who == "operator" else "--local")
    worker = world.lease("r1", "w1")["w1"]
    if who == "worker":
        configure(worker, "--local")
    worker.write("new dir/untracked \u00e9.txt", "new\n")
    (worker.path / "run.sh").chmod(0o755)
    (worker.path / "link").symlink_to("f2.txt")
    worker.write("blob.bin", bytes(range(256)))
    worker.write("a.odd", "two\n")
    worker.write("blank.txt", "a\n\nb\n \n\n\n\n")
    worker.write("upper/F1.TXT", "another\n")
    (worker.path / "f1.txt").rename(worker.path / "renamed.txt")
    answer = world.freeze("r1", "w1")
    assert answer.code == 0, answer
    world.git_env["GIT_CONFIG_GLOBAL"] = "/dev/null"
    world.env["GIT_CONFIG_GLOBAL"] = "/dev/null"
    found = world.round_trip("r1", "w1")
    assert found[b"run.sh"][0] == "100755" and found[b"link"] == ("120000", b"f2.txt")
    assert {"f1.txt", "renamed.txt", "new dir/untracked \u00e9.txt", "upper/F1.TXT"} <= set(changed(world))
    assert b"\x1b[" not in patch(world) and b"diff --git a/f1.txt b/f1.txt" in patch(world)
    assert b"rename from" not in patch(world) and b"\nindex " in patch(world)


@pytest.mark.parametrize("where", ["worktree", "info", "global"])
def test_no_attribute_that_is_for_showing_changes_the_patch(world: World, repo: Repo, where: str) -> None:
    """A textconv or ``-diff`` attribute left a patch that said "Binary files differ", or showed converted text.

    Design 7, freeze 3: a binary full-index patch, proven by applying it.
    """
    rules = "*.doc diff=odd\n*.bin -diff\n*.lock -diff -merge linguist-generated\n*.txt diff=python whitespace=tab\n"
    repo.git("config", "--global", "diff.odd.textconv", "tr a-z A-Z <")
    if where == "info":
        repo.write(".git/info/attributes", rules)
    elif where == "global":
        (world.root / "attributes").write_text(rules)
        world.config("core.attributesFile", str(world.root / "attributes"))
    repo.commit("kinds", **{"a.doc": "text\n", "a.lock": "1\n", "a.txt": "1\n", "a.bin": "\0"})
    worker = world.lease("r1", "w1")["w1"]
    if where == "worktree":
        worker.write(".gitattributes", rules)
    for name in ("a.doc", "a.lock", "a.txt", "a.bin"):
        worker.write(name, "two\n")
    assert world.freeze("r1", "w1").code == 0
    assert b"Binary files" not in patch(world) and b"TWO" not in patch(world)
    assert world.manifest("r1", "w1")["complete"] is True
    world.git_env["GIT_CONFIG_GLOBAL"] = world.env["GIT_CONFIG_GLOBAL"] = "/dev/null"
    world.round_trip("r1", "w1")


# --- every way in which a worker ends ------------------------------------------------------------


@pytest.mark.parametrize("ending", ["succeeded", "failed", "cancelled", "reconcile", "never-started"])
def test_however_a_worker_ends_nothing_that_it_made_is_lost(world: World, repo: Repo, ending: str) -> None:
    """A cleanup that saw a clean tree took an ignored .env, untracked files and commits of a detached HEAD with it.

    Design 10, invariant 8: nothing unrepresentable is dropped silently, in whichever ending.
    """
    worker = world.lease("r1", "w1", start=ending != "never-started")["w1"]
    worker.git("switch", "-q", "--detach")
    commit = worker.commit("detached", **{"committed.txt": "committed\n"})
    worker.git("switch", "-q", "lionagi/r1/w1")
    worker.write("untracked.txt", "untracked\n")
    worker.write("secret.log", "TOKEN=1\n")
    worker.write("f1.txt", "edited\n")
    worker.git("config", "status.showUntrackedFiles", "no")
    worker.git("update-index", "--skip-worktree", "f1.txt")
    assert worker.git("status", "--porcelain") == ""
    if ending == "reconcile":
        assert world.lionwt("reconcile", "r1", "--takeover").code == 0
    else:
        assert world.freeze("r1", "w1", "--failed" if ending == "never-started" else f"--{ending}").code == 0
        if ending != "never-started":
            assert world.promote("r1").code in (0, 3)
    record = world.record("r1", "w1")
    assert (record["worktree_removed"], record["branch_deleted"]) == (True, True), record
    assert record["status"] == ("promoted" if ending == "succeeded" else "discarded")
    assert {"untracked.txt", "f1.txt"} <= set(changed(world))
    assert b"+untracked" in patch(world) and b"+edited" in patch(world)
    assert world.saved("r1", "w1")["secret.log"][1] == b"TOKEN=1\n"
    heads = repo.git("bundle", "list-heads", str(world.evidence("r1", "w1") / "commits.bundle"))
    assert commit in heads
    assert not worker.path.exists()


def test_the_base_of_a_lease_is_the_one_it_was_leased_with_however_often_it_is_resumed(
    world: World, repo: Repo
) -> None:
    """An agent that was resumed had its baseline read from its worktree anew, and its earlier commits were "no change".

    Design 10, invariant 4: base_sha never changes.
    """
    base = repo.head()
    worker = world.lease("r1", "w1")["w1"]
    worker.commit("before the pause", **{"early.txt": "early\n"})
    repo.commit("the target goes on", **{"other.txt": "other\n"})
    repo.git("branch", "-f", "main", "work")
    for _ in range(2):
        again = world.lionwt("start", "r1", "w1", "--json")
        assert again.code == 0 and again.json["lease"]["base_sha"] == base
        assert world.lionwt("status", "r1", "--json").code == 0
        assert world.lionwt("reconcile", "r1", "--takeover", "--dry-run", "--json").code == 0
    worker.commit("after the pause", **{"late.txt": "late\n"})
    worker.write("open.txt", "open\n")
    assert world.freeze("r1", "w1").code == 0
    assert world.lease_file("r1", "w1")["lease"]["base_sha"] == base
    assert changed(world) == ["early.txt", "late.txt", "open.txt"]
    world.round_trip("r1", "w1")


@pytest.mark.parametrize("move", ["ahead", "back", "elsewhere", "gone", "renamed", "tag", "replaced"])
def test_the_patch_is_against_the_base_wherever_the_target_has_gone(world: World, repo: Repo, move: str) -> None:
    """Compared with a branch that had moved, the patch showed other people's work as deleted.

    Design 7, freeze 3: a patch against ``base_sha``.
    """
    worker = world.lease("r1", "w1")["w1"]
    worker.write("own.txt", "own\n")
    if move == "ahead":
        repo.commit("theirs", **{"theirs.txt": "theirs\n"})
    elif move == "back":
        repo.commit("one more")
        repo.git("reset", "-q", "--hard", "HEAD~1")
    elif move == "elsewhere":
        repo.git("switch", "-q", "--orphan", "other")
        repo.commit("unrelated", **{"unrelated.txt": "unrelated\n"})
        repo.git("branch", "-f", "work", "other")
    elif move == "gone":
        repo.git("switch", "-q", "main")
        repo.git("branch", "-q", "-D", "work")
    elif move == "renamed":
        repo.git("branch", "-m", "work", "renamed")
    elif move == "tag":
        repo.git("tag", world.lease_file("r1", "w1")["lease"]["base_sha"], "main")
        repo.git("tag", "work", "main")
    elif move == "replaced":
        other = repo.git("commit-tree", "-m", "false", repo.git("mktree", input=b""))
        repo.git("replace", repo.head(), other)
        world.git_env["GIT_NO_REPLACE_OBJECTS"] = world.env["GIT_NO_REPLACE_OBJECTS"] = "1"
    assert world.freeze("r1", "w1").code == 0
    assert changed(world) == ["own.txt"]
    world.round_trip("r1", "w1")


# --- the index -----------------------------------------------------------------------------------


def _assume(worker: Repo) -> None:
    worker.git("update-index", "--assume-unchanged", "f1.txt")


def _skip(worker: Repo) -> None:
    worker.git("update-index", "--skip-worktree", "f1.txt")


def _both(worker: Repo) -> None:
    _assume(worker)
    _skip(worker)


def _fsmonitor_valid(worker: Repo) -> None:
    worker.git("update-index", "--fsmonitor")
    worker.git("update-index", "--fsmonitor-valid", "f1.txt")


def _split(worker: Repo) -> None:
    worker.git("update-index", "--split-index")
    _skip(worker)


def _untracked_cache(worker: Repo) -> None:
    worker.git("update-index", "--force-untracked-cache")
    worker.git("status")


def _intent(worker: Repo) -> None:
    worker.write("new.txt", "intent\n")
    worker.git("add", "-N", "new.txt")


def _staged_then_gone(worker: Repo) -> None:
    worker.git("rm", "-q", "--cached", "f1.txt", "f2.txt")


def _empty_index(worker: Repo) -> None:
    worker.git("read-tree", "--empty")


def _other_tree(worker: Repo) -> None:
    worker.git("read-tree", worker.git("mktree", input=b""))


def _version_4(worker: Repo) -> None:
    worker.git("update-index", "--index-version", "4")
    _skip(worker)


INDEXES = [
    _assume, _skip, _both, _fsmonitor_valid, _split, _untracked_cache, _intent, _staged_then_gone, _empty_index,
    _other_tree, _version_4,
]  # fmt: skip


def test_whatever_state_its_index_is_in_the_capture_is_the_disk_and_the_index_stays(world: World, repo: Repo) -> None:
    """An edit behind an index flag was invisible to status and diff; a capture by ``add`` and ``reset`` lost the flags.

    Design 7, freeze 2: capture into a private index; the worker's index, HEAD and files untouched.
    """
    names = [make.__name__.strip("_").replace("_", "-") for make in INDEXES]
    workers = world.lease("r1", *names)
    for name, make in zip(names, INDEXES, strict=True):
        worker = workers[name]
        world.settle_index("r1", name)
        make(worker)
        worker.write("f1.txt", "edited\n")
        worker.write("new.txt", "new\n")
        (worker.path / "f3.txt").unlink()
        before = world.standing("r1", name)
        answer = world.freeze("r1", name)
        assert answer.code == 0, (name, answer)
        assert world.standing("r1", name) == before, name
        assert changed(world, name) == ["f1.txt", "f3.txt", "new.txt"], name
        world.round_trip("r1", name)


def test_a_freeze_that_failed_before_leaves_nothing_that_a_later_one_could_take(world: World, repo: Repo) -> None:
    """A failed ``add`` went unnoticed, and ``write-tree`` on the same index gave the snapshot of an hour before.

    Design 7, freeze: the lease stays running, freeze can be repeated; what is proven is the tree of now.
    """
    worker = world.lease("r1", "w1")["w1"]
    worker.write("good.txt", "old\n")
    worker.write("secret.txt", "secret\n").chmod(0)
    refused = world.lionwt("freeze", "r1", "w1", "--json", "--succeeded", wrapper=unprivileged())
    assert (refused.code, refused.error) == (4, "patch_missing"), refused
    assert not (world.evidence("r1", "w1") / "candidate.patch").exists()
    promoted = world.promote("r1")
    assert promoted.code == 6 and promoted.json["records"] == [], promoted
    worker.write("good.txt", "new\n")
    (worker.path / "f1.txt").unlink()
    (worker.path / "secret.txt").chmod(0o600)
    assert world.freeze("r1", "w1").code == 0
    found = world.round_trip("r1", "w1")
    assert found[b"good.txt"][1] == b"new\n" and b"f1.txt" not in found


@pytest.mark.parametrize("blocks", [1, 40])
def test_a_patch_that_a_limit_cuts_short_is_no_candidate(world: World, repo: Repo, blocks: int) -> None:
    """A patch that a size cap cut at a file's boundary still applied, and the rest of the change was gone.

    Design 7, freeze 3: proven by applying the patch to the base and comparing tree ids.
    """
    worker = world.lease("r1", "w1")["w1"]
    for number in range(40):
        worker.write(f"many/{number}.txt", "".join(f"{number} {line}\n" for line in range(200)))
    lease, standing = world.lease_bytes("r1", "w1"), world.standing("r1", "w1")
    limited = ("sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh")
    answer = world.lionwt("freeze", "r1", "w1", "--json", "--succeeded", wrapper=limited)
    assert answer.code in (4, 8), answer
    assert world.lease_bytes("r1", "w1") == lease
    assert {name: entry for name, entry in world.standing("r1", "w1").items() if "lionwt" not in name} == {
        name: entry for name, entry in standing.items() if "lionwt" not in name
    }
    assert not (world.evidence("r1", "w1") / "candidate.patch").exists()
    assert world.freeze("r1", "w1").code == 0
    world.round_trip("r1", "w1")


# --- repositories inside -------------------------------------------------------------------------


def _dangling_git_file(inner: Path, world: World) -> None:
    (inner / ".git").write_text("gitdir: ../nowhere\n")


def _garbage_git_file(inner: Path, world: World) -> None:
    (inner / ".git").write_text("garbage\n")


def _empty_git_dir(inner: Path, world: World) -> None:
    (inner / ".git").mkdir()


def _linked_git_dir(inner: Path, world: World) -> None:
    (inner / ".git").symlink_to(world.repo("elsewhere").path / ".git")


def _git_file_to_another(inner: Path, world: World) -> None:
    (inner / ".git").write_text(f"gitdir: {world.repo('elsewhere').path / '.git'}\n")


def _separate_git_dir(inner: Path, world: World) -> None:
    Repo(inner, world.git_environment()).git("init", "-q", "--separate-git-dir", str(world.root / "separate"))


def _detached_unborn(inner: Path, world: World) -> None:
    Repo(inner, world.git_environment()).git("init", "-q")
    (inner / ".git/HEAD").write_text("garbage\n")


@pytest.mark.parametrize(
    "make",
    [_dangling_git_file, _garbage_git_file, _empty_git_dir, _linked_git_dir, _git_file_to_another, _separate_git_dir,
     _detached_unborn],
    ids=lambda make: make.__name__.strip("_"),
)  # fmt: skip
def test_anything_that_git_could_take_for_a_repository_is_captured_or_refused_by_name(
    world: World, repo: Repo, make: Callable[[Path, World], None]
) -> None:
    """A scaffold brought a ``.git`` of its own, and its whole directory landed as one empty gitlink.

    Design 7, freeze 4: nested repositories are never lost in silence; never a silent gitlink.
    """
    worker = world.lease("r1", "w1")["w1"]
    worker.write("good.txt", "good\n")
    worker.write("app/code.txt", "code\n")
    make(worker.path / "app", world)
    answer = world.freeze("r1", "w1")
    if answer.code == 0:
        tree = world.manifest("r1", "w1")["tree"]
        assert "160000" not in repo.git("ls-tree", "-r", tree)
        assert repo.git("show", f"{tree}:app/code.txt") == "code"
        return
    assert (answer.code, answer.error) == (4, "embedded_repository"), answer
    assert "app" in answer.json["error"]["message"]
    assert world.freeze("r1", "w1", "--failed", "--accept-incomplete").code == 0
    assert world.saved("r1", "w1")["app/code.txt"][1] == b"code\n"
    assert "good.txt" in changed(world)


def test_a_bare_repository_inside_is_files_like_any_other(world: World, repo: Repo) -> None:
    """A fixture that is a bare repository is content: all of it is captured, and nothing in it is run.

    Design 7, freeze 2: everything untracked.
    """
    worker = world.lease("r1", "w1")["w1"]
    worker.git("init", "-q", "--bare", "fixture.git")
    ran = world.root / "ran"
    worker.git("--git-dir", "fixture.git", "config", "core.fsmonitor", f"touch {ran}")
    assert world.freeze("r1", "w1").code == 0
    assert {"fixture.git/HEAD", "fixture.git/config"} <= set(changed(world)) and not ran.exists()
    world.round_trip("r1", "w1")


# --- kinds of files ------------------------------------------------------------------------------


def test_directories_shared_by_links_survive_the_worktree_that_linked_them(world: World, repo: Repo) -> None:
    """A shared node_modules was emptied by the cleanup of the worktree that had it as a link.

    Design 10, invariant 16: removal never leaves the recorded inode.
    """
    shared = world.root / "shared"
    for name in ("node_modules/a/index.js", "cache/x", "single"):
        path = shared / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("shared\n")
        path.chmod(0o444)
    (shared / "cache").chmod(0o555)
    before = files_of(shared)
    modes = {path: path.stat().st_mode for path in shared.rglob("*")}
    workers = world.lease("r1", "w1", "w2")
    root = workers["w1"].path
    (root / "node_modules").symlink_to(shared / "node_modules")
    (root / "ignored").mkdir()
    (root / "ignored/cache").symlink_to(shared / "cache")
    (root / "ignored/up").symlink_to("../../../../../../shared")
    (root / "chain").symlink_to("ignored/cache")
    (root / "loop").symlink_to("loop")
    (root / "sibling").symlink_to(workers["w2"].path)
    (root / "checkout").symlink_to(repo.path)
    os.link(shared / "single", root / "hard.log")
    assert world.freeze("r1", "w1").code == 0
    assert world.promote("r1", "w1").json["records"][0]["worktree_removed"] is True
    assert files_of(shared) == before
    assert {path: path.stat().st_mode for path in shared.rglob("*")} == modes
    assert (workers["w2"].path / "f1.txt").exists() and (repo.path / "f1.txt").exists()
    for name in ("node_modules", "chain", "loop", "sibling", "checkout"):
        assert (repo.path / name).is_symlink()


CONTENTS = {
    "latin": b"caf\xe9\n\x80\xff\n",
    "utf-16": "w\u00f6rter\n".encode("utf-16"),
    "nul": b"a\0b\n",
    "lone-cr": b"a\rb\r\n\r",
    "long-line": b"x" * 300_000,
    "no-newline": b"a\n\\ No newline at end of file",
    "blank-end": b"a\n\n\n \n\t\n\n",
    "a-patch": b"\xef\xbb\xbfa\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n",
}


def test_content_of_any_kind_comes_back_byte_for_byte(world: World, repo: Repo) -> None:
    """A patch decoded as text, or stripped at its end, was corrupt, and all of the worker's changes were lost.

    Design 6: bytes in and out.
    """
    for kind, content in CONTENTS.items():
        repo.write(f"{kind}.old", content)
        repo.write(f"{kind}.mixed", b"first\n" + content)
    repo.commit("kinds")
    worker = world.lease("r1", "w1")["w1"]
    for kind, content in CONTENTS.items():
        worker.write(f"{kind}.old", content[::-1])
        worker.write(f"{kind}.mixed", b"second\n" + content)
        worker.write(f"{kind}.new", content)
    worker.git("-c", "i18n.commitEncoding=latin1", "commit", "-qam", b"caf\xe9".decode("utf-8", "surrogateescape"))
    # The last hunk of the patch ends in blank context.
    worker.write("blank-end.old", CONTENTS["blank-end"].replace(b"a", b"b"))
    assert world.freeze("r1", "w1").code == 0
    found = world.round_trip("r1", "w1")
    for kind, content in CONTENTS.items():
        assert found[f"{kind}.new".encode()][1] == content, kind
    assert world.promote("r1").code == 0
    for kind, content in CONTENTS.items():
        assert (repo.path / f"{kind}.mixed").read_bytes() == b"second\n" + content, kind


def test_every_change_of_kind_of_an_entry_is_named_and_lands(world: World, repo: Repo) -> None:
    """A file that became a link was reported as deleted, and the link was followed out of the tree.

    Design 7, freeze 2: modes, symlinks; the manifest names the change of type, renames give both names.
    """
    outside = world.root / "outside.txt"
    outside.write_text("outside\n")
    (repo.path / "link").symlink_to("f1.txt")
    repo.commit("kinds", **{"dir/a.txt": "a\n", "exec.sh": "#!/bin/sh\n", "moved.txt": "moved\n" * 50})
    worker = world.lease("r1", "w1")["w1"]
    (worker.path / "f1.txt").unlink()
    (worker.path / "f1.txt").symlink_to(outside)
    (worker.path / "link").unlink()
    worker.write("link", "a file now\n")
    (worker.path / "exec.sh").chmod(0o755)
    shutil.rmtree(worker.path / "dir")
    worker.write("dir", "a file now\n")
    (worker.path / "f2.txt").unlink()
    worker.write("f2.txt/inside.txt", "a directory now\n")
    (worker.path / "moved.txt").rename(worker.path / "there.txt")
    assert world.freeze("r1", "w1").code == 0
    rows = {row["path"]: row["status"] for row in world.manifest("r1", "w1")["files"]}
    assert rows == {
        "dir": "A", "dir/a.txt": "D", "exec.sh": "M", "f1.txt": "T", "f2.txt": "D", "f2.txt/inside.txt": "A",
        "link": "T", "moved.txt": "D", "there.txt": "A",
    }  # fmt: skip
    assert changed(world) == sorted(rows)
    assert "symlink_leaves_worktree" in {note["code"] for note in world.manifest("r1", "w1")["diagnostics"]}
    assert b"outside\n" not in patch(world)
    assert world.promote("r1").code == 0
    assert os.readlink(repo.path / "f1.txt") == str(outside) and outside.read_text() == "outside\n"
    assert os.access(repo.path / "exec.sh", os.X_OK) and repo.status() == ""


def test_excludes_that_are_nobodys_in_the_tree_hide_nothing_and_those_in_it_name_what_they_hide(
    world: World, repo: Repo
) -> None:
    """The operator's global excludes matched what the worker had written, and it was not in the patch.

    Design 7, freeze 2 and 4: everything untracked; ignored files are named.
    """
    (world.home / ".config/git").mkdir(parents=True)
    (world.home / ".config/git/ignore").write_text("*.xdg\n")
    (world.root / "excludes").write_text("*.global\n")
    world.config("core.excludesFile", str(world.root / "excludes"))
    (repo.path / ".git/info/exclude").write_text("*.info\n")
    repo.commit("rules", **{"sub/.gitignore": "*.sub\n!kept.sub\n"})
    worker = world.lease("r1", "w1")["w1"]
    worker.git("config", "core.excludesFile", str(world.root / "excludes"))
    admin = Path(world.lease_file("r1", "w1")["identity"]["admin_dir"])
    (admin / "info").mkdir(exist_ok=True)
    (admin / "info/exclude").write_text("*.admin\n")
    worker.write(".gitignore", "*.log\nignored/\n*.own\n")
    shown = ["a.xdg", "a.global", "a.info", "a.admin", "sub/kept.sub", ".worktrees/x"]
    hidden = ["a.own", "sub/a.sub", "b.log", "ignored/deep/x"]
    for name in (*shown, *hidden):
        worker.write(name, "x\n")
    assert world.freeze("r1", "w1").code == 0
    assert set(changed(world)) == {".gitignore", *shown}
    assert {row["path"] for row in world.manifest("r1", "w1")["ignored"]} == set(hidden)
    assert set(world.saved("r1", "w1")) == set(hidden)


def test_a_patch_and_no_patch_are_never_taken_for_each_other(world: World, repo: Repo) -> None:
    """An empty patch and a missing one both failed in ``git apply``, and both were called "no change".

    Design 10, invariant 7: missing is not empty.
    """
    workers = world.lease("r1", "empty", "gone", "reverted", "present")
    workers["reverted"].commit("there", **{"f1.txt": "there\n"})
    workers["reverted"].git("revert", "--no-edit", "HEAD")
    workers["present"].write("new.txt", "new\n")
    for name in workers:
        world.freeze_now("r1", name)
    assert patch(world, "empty") == patch(world, "reverted") == b"" != patch(world, "present")
    (world.evidence("r1", "gone") / "candidate.patch").unlink()
    (world.evidence("r1", "reverted") / "candidate.patch").write_bytes(b"\n")
    before = repo.untouched()
    answer = world.promote("r1", "empty", "gone", "reverted")
    found = {row["lease"]["worker_id"]: row["status"] for row in answer.json["records"]}
    assert found == {"empty": "discarded", "gone": "needs_resolution", "reverted": "needs_resolution"}
    assert repo.untouched() == before
    assert world.promote("r1", "present").code == 0


def test_no_state_of_lionwts_is_in_what_it_captures(world: World, repo: Repo) -> None:
    """A snapshot held the artifacts of the snapshot before it, and grew with every freeze.

    Design 3: state and evidence lie outside of the worktrees, and are refused there.
    """
    workers = world.lease("r1", "w1", "w2")
    workers["w1"].write("new.txt", "new\n")
    for _ in range(2):
        assert world.freeze("r1", "w1").code == 0
    assert changed(world) == ["new.txt"]
    for home in (workers["w2"].path, workers["w2"].path / "state", repo.path / ".worktrees/x"):
        answer = world.lionwt("lease", "r2", "-w", "w", "--target", "work", "--json", env={"LIONAGI_HOME": str(home)})
        assert (answer.code, answer.error) == (3, "path_unsafe"), answer
        assert not (home / "runs").exists()
    inside = world.lionwt("lease", "r2", "-w", "w", "--target", "work", "--json", cwd=workers["w2"].path)
    assert (inside.code, inside.error) == (3, "path_unsafe"), inside


# --- who else writes -----------------------------------------------------------------------------


def test_stash_entries_that_came_since_the_lease_are_named_with_whose_they_are(world: World, repo: Repo) -> None:
    """The one stash of all worktrees gave an agent the work of another, and its own stayed behind unseen.

    lionwt never stashes; freeze names the entries that appeared since the lease, by the branch in the entry.
    """
    repo.write("f1.txt", "before\n")
    repo.git("stash", "-q")
    workers = world.lease("r1", "w1", "detached", "other", "quiet")
    for name, where in (("w1", ()), ("detached", ("--detach",)), ("other", ("-c", "feature/x"))):
        if where:
            workers[name].git("switch", "-q", *where)
        workers[name].write("f2.txt", f"{name}\n")
        workers[name].git("stash", "push", "-q", "-m", f"of {name}")
    before = repo.git("stash", "list")
    notes = {}
    for name in workers:
        assert world.freeze("r1", name).code == 0
        found = [
            note["message"] for note in world.manifest("r1", name)["diagnostics"] if note["code"] == "stash_entries"
        ]
        notes[name] = found[0] if found else ""
    assert "1 stash entry of this branch" in notes["w1"]
    assert "feature/x" in notes["other"] and "no branch" in notes["detached"]
    assert repo.git("stash", "list") == before and len(before.splitlines()) == 4
    assert world.promote("r1").code == 0
    assert repo.git("stash", "list") == before


@pytest.mark.parametrize("how", ["init", "bare", "worktree", "both"])
def test_a_shared_configuration_that_a_worker_broke_is_named_and_left(world: World, repo: Repo, how: str) -> None:
    """``git init`` with GIT_DIR of a linked worktree wrote core.bare=true, and every checkout was broken.

    Design 6: lionwt never writes the shared configuration; where git would act elsewhere it stops and says so.
    """
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    config = repo.path / ".git/config"
    sound = config.read_bytes()
    if how == "init":
        admin = worker.git("rev-parse", "--absolute-git-dir")
        worker.git("init", "-q", env={**worker.env, "GIT_DIR": admin})
    for key, value in (("core.bare", "true"), ("core.worktree", str(world.home))):
        if how in ("both", key.partition(".")[2]):
            subprocess.run(["git", "config", "--file", config, key, value], check=True, env=repo.env)
    broken = config.read_bytes()
    assert (broken != sound) or how == "init"
    assert world.freeze("r1", "w1").code == 0
    answer = world.promote("r1")
    if broken != sound:
        assert (answer.code, answer.error) == (7, "repository_unsafe"), answer
        assert "git config --file" in answer.json["error"]["hint"]
        assert config.read_bytes() == broken and world.lease_file("r1", "w1")["lease"]["state"] == "frozen"
        config.write_bytes(sound)
        answer = world.promote("r1")
    assert answer.code == 0, answer
    assert repo.status() == "" and (repo.path / "new.txt").exists()

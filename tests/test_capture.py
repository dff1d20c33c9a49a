"""What freeze captures: every kind of file, byte for byte, or a clear refusal."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Repo, World, files_of, unprivileged

BINARY = bytes(range(256)) * 8


def put(root: Path, name: bytes, content: bytes = b"x\n") -> bytes:
    """Write a file whose name is bytes."""
    path = os.path.join(os.fsencode(root), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
    return path


def by_path(rows: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    return {str(row["path"]): row for row in rows}


def codes(world: World, run: str, worker: str) -> set[str]:
    return {note["code"] for note in world.lease_file(run, worker)["diagnostics"]}


def refused(world: World, worker: str, code: str, *arguments: str, exit_code: int = 4, run: str = "r1") -> str:
    """Freeze, and prove that the refusal left lease, worktree, index, refs and evidence as they were."""
    lease, standing = world.lease_bytes(run, worker), world.standing(run, worker)
    evidence = world.evidence(run, worker)
    answer = world.freeze(run, worker, *arguments)
    assert (answer.code, answer.error) == (exit_code, code), answer
    assert world.lease_bytes(run, worker) == lease
    assert world.standing(run, worker) == standing
    assert not evidence.exists() or list(evidence.iterdir()) == []
    assert list((world.state(run) / "git" / "lionwt").glob(f"{worker}.*/")) == []
    assert answer.json["error"]["hint"]
    return str(answer.json["error"]["message"])


# What git can hold -----------------------------------------------------------


def test_every_kind_of_file_comes_back_from_the_patch_byte_for_byte(world: World, repo: Repo) -> None:
    """ADR-0091 D3: freeze captures a complete, non-staging patch."""
    base = {
        b"blob.bin": BINARY,
        b"mode.sh": b"#!/bin/sh\n",
        b"run.sh": b"#!/bin/sh\n",
        b"full.txt": b"something\n",
        b"dirtofile/a/b.txt": b"b\n",
        b"dirtofile/c.txt": b"c\n",
        b"filetodir": b"file\n",
        b"filetolink": b"file\n",
        b"dirtolink/below/x.txt": b"x\n",
        b"dirtolink/y.txt": b"y\n",
        b"crlf.txt": b"one\r\ntwo\r\n",
        b"lf.txt": b"one\ntwo\n",
        b"ends.txt": b"a\nb\n",
        b"open.txt": b"a\nb",
        b"old name.txt": b"".join(b"%d\n" % number for number in range(50)),
        b"Case.txt": b"case\n",
        b"caf\xe9/\xff.txt": b"latin\n",
        b"trailing.txt": b"a  \n\n\n\t\n",
        b".gitmodules": b"not a submodule\n",
        b"deep/er/than/this/gone.txt": b"gone\n",
    }
    for name, content in base.items():
        put(repo.path, name, content)
    (repo.path / "run.sh").chmod(0o755)
    (repo.path / "link").symlink_to("f1.txt")
    (repo.path / "linktofile").symlink_to("f1.txt")
    (repo.path / "linktodir").symlink_to("sub")
    repo.commit("kinds")
    worker = world.lease("r1", "w1")["w1"]
    root = worker.path
    put(root, b"blob.bin", BINARY[::-1])
    put(root, b"new.bin", b"\0\1\2" * 999)
    put(root, b"empty")
    put(root, b"empty", b"")
    put(root, b"full.txt", b"")
    (root / "mode.sh").chmod(0o755)
    (root / "run.sh").chmod(0o644)
    (root / "link").unlink()
    (root / "link").symlink_to("nowhere/at all")
    (root / "newlink").symlink_to("sub/dir")
    (root / "linktofile").unlink()
    put(root, b"linktofile", b"now a file\n")
    (root / "linktodir").unlink()
    put(root, b"linktodir/inside.txt")
    shutil.rmtree(root / "dirtofile")
    put(root, b"dirtofile", b"now a file\n")
    (root / "filetodir").unlink()
    put(root, b"filetodir/inside.txt")
    (root / "filetolink").unlink()
    (root / "filetolink").symlink_to("lf.txt")
    shutil.rmtree(root / "dirtolink")
    (root / "dirtolink").symlink_to("sub")
    put(root, b"crlf.txt", b"one\ntwo\r\n")
    put(root, b"lf.txt", b"one\r\ntwo\n")
    put(root, b"ends.txt", b"a\nb")
    put(root, b"open.txt", b"a\nb\n")
    put(root, b"trailing.txt", b"a\n\n \n\n\n")
    (root / "old name.txt").rename(root / "new name.txt")
    (root / "Case.txt").rename(root / "cASE.txt")
    shutil.rmtree(root / "deep")
    put(root, b".gitmodules", b"[submodule\nbroken")
    put(root, b"sub/.gitmodules", b"x\n")
    put(root, b"caf\xe9/\xff.txt", b"latin changed\n")
    odd = [
        b"new\nline", b'quo"te', b"tab\there", b"-dash", b"--", b"trail ", b" lead", b"\xc3\xbcml\xc3\xa4ut",
        b"\xfe\xff\xfe", b"back\\slash", b"*?[a]", b":(top)x", b"#hash", b"!bang", b"esc\x1b[31m", b"a/..b/...", b"~",
        b"HEAD", b".gitfoo", b"a => b", b"\x01",
    ]  # fmt: skip
    for name in odd:
        put(root, name, name)
    before = world.standing("r1", "w1")
    answer = world.freeze("r1", "w1")
    assert answer.code == 0, answer
    assert world.standing("r1", "w1") == before
    found = world.round_trip("r1", "w1")
    assert found[b"mode.sh"][0] == "100755"
    assert found[b"new\nline"] == ("100644", b"new\nline")
    assert world.manifest("r1", "w1")["complete"] is True
    changed = answer.json["candidate"]["files_changed"]
    assert {"old name.txt", "new name.txt", "Case.txt", "cASE.txt", "caf\udce9/\udcff.txt"} <= set(changed)


@pytest.mark.parametrize("object_format", ["sha1", "sha256"])
def test_deleting_everything_is_a_candidate_like_any_other(world: World, object_format: str) -> None:
    """Design 7, freeze 2: everything deleted is captured; in both object formats."""
    repo = world.repo(object_format=object_format)
    worker = world.lease("r1", "w1")["w1"]
    for entry in list(worker.path.iterdir()):
        if entry.name != ".git":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    assert world.freeze("r1", "w1").code == 0
    assert world.round_trip("r1", "w1") == {}
    assert len(world.lease_file("r1", "w1")["candidate"]["files_changed"]) == 5
    assert world.promote("r1").code == 0
    assert repo.git("ls-tree", "-r", "work") == ""


def test_many_files_and_a_large_one_are_captured_whole(world: World, repo: Repo) -> None:
    """Case 26: the patch is written by git into its file and proven, never cut."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("large.bin", os.urandom(1 << 16) * 800)
    for number in range(5000):
        put(worker.path, b"many/%d/%d.txt" % (number % 40, number), b"%d\n" % number)
    answer = world.freeze("r1", "w1")
    assert answer.code == 0, answer
    assert len(answer.json["candidate"]["files_changed"]) == 5001
    world.round_trip("r1", "w1")


def test_what_the_index_of_the_worker_hides_or_half_knows_is_captured_as_it_lies_on_disk(
    world: World, repo: Repo
) -> None:
    """Case 13 and design 7, freeze 2: no flag, stage or time stamp of the worker's index hides an edit."""
    for name in ("half.txt", "skip.txt", "assume.txt", "same.txt", "cached.txt", "restored.txt"):
        repo.write(name, "base\n")
    repo.commit("more")
    worker = world.lease("r1", "w1")["w1"]
    world.settle_index("r1", "w1")
    worker.git("update-index", "--skip-worktree", "skip.txt")
    worker.git("update-index", "--assume-unchanged", "assume.txt")
    worker.write("skip.txt", "edited\n")
    worker.write("assume.txt", "edited\n")
    seen = (worker.path / "same.txt").stat()
    worker.write("same.txt", "esab\n")
    os.utime(worker.path / "same.txt", ns=(seen.st_atime_ns, seen.st_mtime_ns))
    worker.write("half.txt", "staged\n")
    worker.git("add", "half.txt")
    worker.write("half.txt", "staged, then edited\n")
    worker.write("restored.txt", "staged\n")
    worker.git("add", "restored.txt")
    worker.write("restored.txt", "base\n")
    worker.write("staged-gone.txt", "staged\n")
    worker.git("add", "staged-gone.txt")
    (worker.path / "staged-gone.txt").unlink()
    worker.git("rm", "-q", "--cached", "cached.txt")
    worker.write("intent.txt", "intent\n")
    worker.git("add", "--intent-to-add", "intent.txt")
    worker.write("forced.log", "forced\n")
    worker.write("ignored/forced.txt", "forced\n")
    worker.git("add", "--force", "forced.log", "ignored/forced.txt")
    before = world.standing("r1", "w1")
    assert world.freeze("r1", "w1").code == 0
    assert world.standing("r1", "w1") == before
    found = world.round_trip("r1", "w1")
    assert b"forced.log" in found and b"staged-gone.txt" not in found and b"cached.txt" in found
    manifest = world.manifest("r1", "w1")
    assert manifest["index_flags"] == ["assume.txt", "skip.txt"]
    changed = set(world.lease_file("r1", "w1")["candidate"]["files_changed"])
    assert changed == {
        "assume.txt", "forced.log", "half.txt", "ignored/forced.txt", "intent.txt", "same.txt", "skip.txt"
    }  # fmt: skip


@pytest.mark.parametrize("sparse_index", [False, True], ids=["full-index", "sparse-index"])
def test_a_worktree_that_the_worker_made_sparse_deletes_nothing(world: World, repo: Repo, sparse_index: bool) -> None:
    """Cases 57 and 109: what a sparse definition took off the disk is no deletion, what lies there is captured."""
    repo.commit("more", **{"in/a.txt": "a\n", "out/b.txt": "b\n", "out/c.txt": "c\n", "out/d.txt": "d\n"})
    worker = world.lease("r1", "w1")["w1"]
    worker.commit("before", **{"out/c.txt": "c changed\n", "out/new.txt": "new\n"})
    worker.git("sparse-checkout", "set", "--cone", *(["--sparse-index"] if sparse_index else []), "in")
    assert not (worker.path / "out").exists()
    worker.write("in/a.txt", "a edited\n")
    worker.write("out/d.txt", "d edited outside of the definition\n")
    worker.write("out/untracked.txt", "untracked outside\n")
    (worker.path / "f1.txt").unlink()
    before = world.standing("r1", "w1")
    assert world.freeze("r1", "w1").code == 0
    assert world.standing("r1", "w1") == before
    assert set(world.lease_file("r1", "w1")["candidate"]["files_changed"]) == {
        "f1.txt", "in/a.txt", "out/c.txt", "out/d.txt", "out/new.txt", "out/untracked.txt"
    }  # fmt: skip
    found = files_of(world.applied("r1", "w1").path)
    assert found[b"out/b.txt"] == ("100644", b"b\n")
    assert found[b"out/c.txt"] == ("100644", b"c changed\n")
    assert found[b"out/d.txt"] == ("100644", b"d edited outside of the definition\n")
    assert b"f1.txt" not in found
    assert world.manifest("r1", "w1")["sparse"] == ["out/b.txt", "out/c.txt", "out/new.txt", "sub/dir/deep.txt"]
    assert world.promote("r1").code == 0
    assert (repo.path / "out/b.txt").read_text() == "b\n"


def test_the_operator_may_work_in_a_sparse_checkout_and_the_worker_still_has_everything(
    world: World, repo: Repo
) -> None:
    """Case 57: a lease switches sparse off for its worktree."""
    repo.commit("more", **{"in/a.txt": "a\n", "out/b.txt": "b\n"})
    repo.git("sparse-checkout", "set", "in")
    worker = world.lease("r1", "w1")["w1"]
    assert (worker.path / "out/b.txt").exists()
    worker.write("out/new.txt", "new\n")
    worker.write("out/b.txt", "b edited\n")
    assert world.freeze("r1", "w1").code == 0
    assert set(world.lease_file("r1", "w1")["candidate"]["files_changed"]) == {"out/b.txt", "out/new.txt"}
    assert world.promote("r1").code == 0
    assert repo.git("show", "work:out/new.txt") == "new"
    assert repo.status() == ""


def test_an_empty_change_has_an_empty_patch_and_the_base_tree(world: World, repo: Repo) -> None:
    """ADR-0091 D3: an empty patch is a valid candidate, and there."""
    worker = world.lease("r1", "w1")["w1"]
    os.utime(worker.path / "f1.txt")
    answer = world.freeze("r1", "w1")
    assert answer.code == 0
    assert answer.json["candidate"]["files_changed"] == []
    assert (world.evidence("r1", "w1") / "candidate.patch").read_bytes() == b""
    manifest = world.manifest("r1", "w1")
    assert manifest["tree"] == repo.git("rev-parse", "work^{tree}")
    assert manifest["commit"] == manifest["base"] == repo.head()
    assert manifest["converted"] == []


def test_a_symlink_out_of_the_worktree_is_kept_as_a_link_and_named(world: World, repo: Repo) -> None:
    """Case 24: a link that leaves the worktree is a diagnostic and never followed."""
    outside = world.root / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret\n")
    worker = world.lease("r1", "w1")["w1"]
    (worker.path / "f1.txt").unlink()
    (worker.path / "f1.txt").symlink_to("/etc/hostname")
    shutil.rmtree(worker.path / "sub")
    (worker.path / "sub").symlink_to(outside)
    (worker.path / "up").symlink_to("../../secret")
    (worker.path / "inside").symlink_to("f2.txt")
    assert world.freeze("r1", "w1").code == 0
    found = world.round_trip("r1", "w1")
    assert found[b"sub"] == ("120000", os.fsencode(outside))
    assert b"sub/secret" not in found
    rows = world.manifest("r1", "w1")["files"]
    assert {row["path"]: row["status"] for row in rows}["f1.txt"] == "T"
    notes = world.manifest("r1", "w1")["diagnostics"]
    named = [note["message"] for note in notes if note["code"] == "symlink_leaves_worktree"]
    assert [message.split(" points")[0] for message in named] == ["f1.txt", "sub", "up"]


# Conversions -----------------------------------------------------------------


def test_a_line_ending_edit_that_git_normalises_is_in_the_manifest_and_kept_raw(world: World, repo: Repo) -> None:
    """Case 29: the worker's own .gitattributes, and autocrlf of the operator, take nothing away in silence."""
    repo.git("config", "--global", "core.autocrlf", "input")
    repo.commit("attributes", **{".gitattributes": "*.eol text eol=lf\n", "a.eol": "one\n", "b.txt": "one\n"})
    worker = world.lease("r1", "w1")["w1"]
    worker.write("a.eol", "one\r\n")
    worker.write("b.txt", "one\r\n")
    worker.write("c.txt", "new\r\nlines\r\n")
    worker.write("raw.dat", b"one\r\n")
    worker.write(".gitattributes", "*.eol text eol=lf\n*.dat -text\n")
    assert world.freeze("r1", "w1").code == 0
    manifest = world.manifest("r1", "w1")
    rows = by_path(manifest["converted"])
    assert set(rows) == {"a.eol", "b.txt", "c.txt"}
    assert {row["kept"] for row in rows.values()} == {"saved.tar"}
    saved = world.saved("r1", "w1")
    assert saved["a.eol"][1] == saved["b.txt"][1] == b"one\r\n"
    assert saved["c.txt"][1] == b"new\r\nlines\r\n"
    # c.txt and raw.dat are new; what differs in line endings alone is no change to git.
    assert world.lease_file("r1", "w1")["candidate"]["files_changed"] == [".gitattributes", "c.txt", "raw.dat"]
    found = files_of(world.applied("r1", "w1").path)
    assert found[b"raw.dat"][1] == b"one\r\n"
    assert manifest["complete"] is True


def test_what_the_operators_lossy_filter_and_ident_take_away_is_kept_raw(world: World, repo: Repo) -> None:
    """Case 31: a clean filter of the operator's own runs, and the raw content is kept."""
    repo.git("config", "--global", "filter.strip.clean", "grep -v output")
    repo.git("config", "--global", "filter.strip.smudge", "cat")
    repo.commit("attributes", **{".gitattributes": "*.nb filter=strip\n*.id ident\n", "v.id": "$Id$\n"})
    worker = world.lease("r1", "w1")["w1"]
    assert (worker.path / "v.id").read_text() != "$Id$\n"
    worker.write("a.nb", "code\noutput=42\n")
    worker.write("v.id", "$Id: mine $\nmore\n")
    assert world.freeze("r1", "w1").code == 0
    assert set(by_path(world.manifest("r1", "w1")["converted"])) == {"a.nb", "v.id"}
    saved = world.saved("r1", "w1")
    assert saved["a.nb"] == (0o644, b"code\noutput=42\n")
    assert saved["v.id"][1] == b"$Id: mine $\nmore\n"
    tree = world.manifest("r1", "w1")["tree"]
    assert repo.git("show", f"{tree}:a.nb") == "code"


def test_attributes_that_are_a_symlink_convert_nothing(world: World, repo: Repo) -> None:
    """Design 6: files named like git's own are content; git does not follow them."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("rules", "* text eol=crlf\n*.txt ident\n")
    (worker.path / ".gitattributes").symlink_to("rules")
    (worker.path / ".gitignore").unlink()
    (worker.path / ".gitignore").symlink_to("rules")
    worker.write("x.txt", "$Id: kept $\r\n")
    worker.write("y.log", "no longer ignored\n")
    assert world.freeze("r1", "w1").code == 0
    world.round_trip("r1", "w1")


# Ignored and special files ---------------------------------------------------


def test_ignored_files_are_named_and_the_small_ones_kept_with_bytes_and_mode(world: World, repo: Repo) -> None:
    """Case 01 and design 7, freeze 4: ignored files are named, small ones saved."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write(".gitignore", "*.log\nignored/\n.env\nhidden.*\n")
    worker.write(".env", "TOKEN=1\n").chmod(0o600)
    worker.write("ignored/deep/run", b"#!/bin/sh\n\0").chmod(0o755)
    worker.write("big.log", b"\0" * (1 << 20) + b"1")
    put(worker.path, b"hidden.\xff\n", b"odd\n")
    (worker.path / "link.log").symlink_to("/etc")
    assert world.freeze("r1", "w1").code == 0
    manifest = world.manifest("r1", "w1")
    rows = by_path(manifest["ignored"])
    assert set(rows) == {".env", "ignored/deep/run", "big.log", "hidden.\udcff\n", "link.log"}
    assert (rows["big.log"]["kept"], rows["big.log"]["bytes"]) == (None, (1 << 20) + 1)
    assert world.saved("r1", "w1") == {
        ".env": (0o600, b"TOKEN=1\n"),
        "ignored/deep/run": (0o755, b"#!/bin/sh\n\0"),
        "hidden.\udcff\n": (0o644, b"odd\n"),
        "link.log": (0o777, b"/etc"),
    }
    assert "ignored_files" in codes(world, "r1", "w1")
    assert manifest["complete"] is True
    world.round_trip("r1", "w1", without=(b".env", b"ignored/deep/run", b"big.log", b"hidden.\xff\n", b"link.log"))


def test_what_only_the_operators_excludes_ignore_is_captured(world: World, repo: Repo) -> None:
    """Case 102: private excludes, whoever wrote them, hide nothing."""
    repo.write("../excludes", "*.gen\n")
    repo.git("config", "--global", "core.excludesFile", str(world.root / "excludes"))
    (world.home / ".config/git").mkdir(parents=True)
    (world.home / ".config/git/ignore").write_text("*.xdg\n")
    (repo.path / ".git/info/exclude").write_text("*.own\n")
    worker = world.lease("r1", "w1")["w1"]
    for name in ("a.gen", "a.xdg", "a.own"):
        worker.write(name, "kept\n")
    assert world.freeze("r1", "w1").code == 0
    assert world.lease_file("r1", "w1")["candidate"]["files_changed"] == ["a.gen", "a.own", "a.xdg"]


def test_fifos_sockets_and_empty_directories_are_named(world: World, repo: Repo) -> None:
    """Case 33: what git does not see is in the manifest, and does not hold up a freeze."""
    worker = world.lease("r1", "w1")["w1"]
    os.mkfifo(worker.path / "pipe")
    os.mkfifo(worker.path / "ignored.log")
    (worker.path / "f1.txt").unlink()
    os.mkfifo(worker.path / "f1.txt")
    (worker.path / "empty/inner").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(worker.path, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{here}/sock")
        os.close(here)
        assert world.freeze("r1", "w1").code == 0
    manifest = world.manifest("r1", "w1")
    assert manifest["not_captured"]["special"] == {
        "f1.txt": "fifo", "ignored.log": "fifo", "pipe": "fifo", "sock": "socket"
    }  # fmt: skip
    assert manifest["not_captured"]["empty_directories"] == ["empty/inner"]
    assert "special_files" in codes(world, "r1", "w1")
    assert world.lease_file("r1", "w1")["candidate"]["files_changed"] == ["f1.txt"]
    record = world.promote("r1").json["records"][0]
    assert (record["status"], record["worktree_removed"]) == ("promoted", True)


def _unreadable_file(worker: Repo) -> str:
    worker.write("secret.txt", "s\n").chmod(0)
    return "secret.txt"


def _unreadable_edit(worker: Repo) -> str:
    worker.write("f1.txt", "edited\n").chmod(0)
    return "f1.txt"


def _unreadable_directory(worker: Repo) -> str:
    worker.write("closed/in.txt", "in\n")
    (worker.path / "closed").chmod(0)
    return "closed"


@pytest.mark.parametrize("make", [_unreadable_file, _unreadable_edit, _unreadable_directory])
def test_an_unreadable_path_refuses_the_freeze_until_it_is_mended_or_given_up(
    world: World, repo: Repo, make: Callable[[Repo], str]
) -> None:
    """Cases 25 and 98: one bad path is named, the capture is missing and not empty."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("good.txt", "good\n")
    worker.write("locked.log", "ignored and unreadable\n").chmod(0)
    name = make(worker)
    lease = world.lease_bytes("r1", "w1")
    arguments = ("freeze", "r1", "w1", "--json")
    answer = world.lionwt(*arguments, "--succeeded", wrapper=unprivileged())
    assert (answer.code, answer.error) == (4, "patch_missing"), answer
    assert name in answer.json["error"]["message"]
    assert world.lease_bytes("r1", "w1") == lease
    given_up = world.lionwt(*arguments, "--failed", "--accept-incomplete", wrapper=unprivileged())
    assert given_up.code == 0, given_up
    manifest = world.manifest("r1", "w1")
    assert manifest["complete"] is False
    assert manifest["not_captured"]["unreadable"] == [name]
    assert by_path(manifest["ignored"])["locked.log"]["kept"] is None
    assert "good.txt" in given_up.json["candidate"]["files_changed"]
    assert name not in given_up.json["candidate"]["files_changed"]


@pytest.mark.parametrize("name", ["git~1", ".GIT/config", "sub/.Git/hooks/x", ".git ./x", ".gitmodules"])
def test_a_name_that_git_refuses_is_never_dropped_in_silence(world: World, repo: Repo, name: str) -> None:
    """Design 10, invariant 8: nothing unrepresentable is dropped silently."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("good.txt", "good\n")
    if name == ".gitmodules":
        (worker.path / name).symlink_to("odd\n")
    else:
        worker.write(name, "odd\n")
    message = refused(world, "w1", "patch_missing")
    assert f"{name} is not taken by git" in message
    assert world.freeze("r1", "w1", "--cancelled", "--accept-incomplete").code == 0
    assert world.manifest("r1", "w1")["not_captured"]["refused"] == [name]
    assert world.saved("r1", "w1")[name][1] == b"odd\n"
    record = world.promote("r1").json["records"][0]
    assert (record["status"], record["teardown_errors"]) == ("discarded", [])
    assert "good.txt" in world.lease_file("r1", "w1")["candidate"]["files_changed"]


# Nested repositories ---------------------------------------------------------


def _nested(worker: Repo, where: str, commits: bool) -> None:
    path = worker.path / where
    path.mkdir(parents=True, exist_ok=True)
    inner = Repo(path, worker.env)
    inner.git("init", "-q")
    inner.write("code.txt", "code\n")
    if commits:
        inner.commit("scaffold")


@pytest.mark.parametrize("where", ["app", "sub/dir"], ids=["new-directory", "tracked-directory"])
@pytest.mark.parametrize("commits", [False, True], ids=["without-commits", "with-commits"])
def test_a_repository_inside_refuses_the_freeze_and_its_files_are_kept_when_given_up(
    world: World, repo: Repo, where: str, commits: bool
) -> None:
    """Case 07: never a silent gitlink, never an older tree; freeze can be repeated."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("good.txt", "good\n")
    _nested(worker, where, commits)
    message = refused(world, "w1", "embedded_repository")
    assert where in message
    answer = world.freeze("r1", "w1", "--succeeded", "--accept-incomplete")
    assert (answer.code, answer.error) == (2, "usage")
    answer = world.freeze("r1", "w1", "--failed", "--accept-incomplete")
    assert answer.code == 0, answer
    saved = world.saved("r1", "w1")
    assert saved[f"{where}/code.txt"][1] == b"code\n"
    assert f"{where}/.git/HEAD" in saved
    manifest = world.manifest("r1", "w1")
    assert manifest["complete"] is False
    assert manifest["not_captured"]["repositories"] == [where]
    assert "good.txt" in answer.json["candidate"]["files_changed"]
    record = world.promote("r1").json["records"][0]
    assert (record["status"], record["worktree_removed"]) == ("discarded", True)


def test_a_freeze_can_be_repeated_after_the_repository_inside_was_dissolved(world: World, repo: Repo) -> None:
    """Design 7, freeze 4: the lease stays running and freeze can be repeated."""
    worker = world.lease("r1", "w1")["w1"]
    _nested(worker, "app", True)
    refused(world, "w1", "embedded_repository")
    shutil.rmtree(worker.path / "app/.git")
    assert world.freeze("r1", "w1").code == 0
    world.round_trip("r1", "w1")


def test_a_repository_that_was_added_as_a_gitlink_is_refused_as_well(world: World, repo: Repo) -> None:
    """Case 07: the worker's own ``git add`` makes no gitlink of a repository without .gitmodules."""
    worker = world.lease("r1", "w1")["w1"]
    _nested(worker, "app", True)
    worker.git("add", "-A")
    assert "160000" in worker.git("ls-files", "-s", "app")
    refused(world, "w1", "embedded_repository")


def test_a_repository_below_an_ignored_directory_is_ignored_with_it(world: World, repo: Repo) -> None:
    """Design 7, freeze 4: what is ignored is named, and holds up nothing."""
    worker = world.lease("r1", "w1")["w1"]
    _nested(worker, "ignored/vendor", True)
    _nested(worker, "ignored/empty", False)
    worker.write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    manifest = world.manifest("r1", "w1")
    assert set(by_path(manifest["ignored"])) == {"ignored/vendor/", "ignored/empty/"}
    assert manifest["complete"] is True
    assert world.lease_file("r1", "w1")["candidate"]["files_changed"] == ["new.txt"]


def test_a_worktree_that_became_a_repository_of_its_own_is_refused(world: World, repo: Repo) -> None:
    """Design 7, freeze 4: a repository in the worktree's own place is a nested one as well."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    (worker.path / ".git").unlink()
    worker.git("init", "-q")
    worker.commit("own history")
    refused(world, "w1", "embedded_repository")
    assert world.freeze("r1", "w1", "--failed", "--accept-incomplete").code == 0
    saved = world.saved("r1", "w1")
    assert saved["new.txt"][1] == b"new\n" and ".git/HEAD" in saved
    assert "new.txt" in world.lease_file("r1", "w1")["candidate"]["files_changed"]


# Submodules ------------------------------------------------------------------


@pytest.fixture
def lib(world: World, repo: Repo) -> Repo:
    """A library that the operator's repository has as its submodule ``lib``."""
    upstream = world.repo("lib", branch="main")
    repo.git("submodule", "--quiet", "add", str(upstream.path), "lib")
    repo.commit("submodule")
    return upstream


def test_a_submodule_that_nobody_initialised_is_as_it_was(world: World, repo: Repo, lib: Repo) -> None:
    """Design 7, freeze 4: an unpopulated submodule is no change."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    assert world.lease_file("r1", "w1")["candidate"]["files_changed"] == ["new.txt"]
    assert world.promote("r1").code == 0


def test_commits_that_only_a_submodule_holds_are_bundled(world: World, repo: Repo, lib: Repo) -> None:
    """Design 7, freeze 4: submodule commits not in the main store are bundled."""
    worker = world.lease("r1", "w1")["w1"]
    worker.git("submodule", "--quiet", "update", "--init")
    inner = Repo(worker.path / "lib", worker.env)
    inner.git("switch", "-q", "-c", "side")
    tip = inner.commit("in the submodule", **{"new.txt": "new\n"})
    answer = world.freeze("r1", "w1")
    assert answer.code == 0, answer
    assert answer.json["candidate"]["files_changed"] == ["lib"]
    row = world.manifest("r1", "w1")["submodules"][0]
    assert row["commit"] == tip
    lib.git("fetch", "-q", str(world.state("r1") / "artifacts" / row["bundle"]), "refs/heads/side:refs/heads/got")
    assert lib.head("got") == tip
    assert lib.git("show", "got:new.txt") == "new"
    record = world.promote("r1").json["records"][0]
    assert (record["status"], record["worktree_removed"]) == ("promoted", True)
    assert repo.git("ls-tree", "work", "lib").split()[2] == tip


@pytest.mark.parametrize("what", ["edit", "untracked"])
def test_uncommitted_work_in_a_submodule_refuses_the_freeze(world: World, repo: Repo, lib: Repo, what: str) -> None:
    """Design 7, freeze 4: what git cannot represent is never lost in silence."""
    worker = world.lease("r1", "w1")["w1"]
    worker.git("submodule", "--quiet", "update", "--init")
    name = "f1.txt" if what == "edit" else "untracked.txt"
    worker.write(f"lib/{name}", "work\n")
    assert f"lib holds uncommitted work: {name}" in refused(world, "w1", "patch_missing")
    assert world.freeze("r1", "w1", "--cancelled", "--accept-incomplete").code == 0
    assert world.saved("r1", "w1")[f"lib/{name}"][1] == b"work\n"


def test_a_submodule_that_the_worker_adds_is_captured_with_its_commits(world: World, repo: Repo) -> None:
    """Design 7, freeze 4: a submodule named by .gitmodules is one, whoever added it."""
    upstream = world.repo("lib", branch="main")
    worker = world.lease("r1", "w1")["w1"]
    worker.git("submodule", "--quiet", "add", str(upstream.path), "vendor/lib")
    answer = world.freeze("r1", "w1")
    assert answer.code == 0, answer
    assert answer.json["candidate"]["files_changed"] == [".gitmodules", "vendor/lib"]
    manifest = world.manifest("r1", "w1")
    assert manifest["submodules"][0]["commit"] == upstream.head()
    assert manifest["submodules"][0]["bundle"]


def test_files_where_a_submodule_belongs_refuse_the_freeze(world: World, repo: Repo, lib: Repo) -> None:
    """Design 7, freeze 4: git looks away from files below a gitlink, lionwt does not."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("lib/lost.txt", "would be lost\n")
    assert "lib/lost.txt" in refused(world, "w1", "patch_missing")
    assert world.freeze("r1", "w1", "--failed", "--accept-incomplete").code == 0
    assert world.saved("r1", "w1")["lib/lost.txt"][1] == b"would be lost\n"
    record = world.promote("r1").json["records"][0]
    assert (record["status"], record["teardown_errors"]) == ("discarded", [])


def test_a_submodule_with_a_dangling_git_file_refuses_the_freeze(world: World, repo: Repo, lib: Repo) -> None:
    """Case 25: one broken submodule pointer never empties the capture."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("good.txt", "good\n")
    worker.write("lib/.git", "gitdir: ../../nowhere\n")
    worker.write("lib/x.txt", "x\n")
    refused(world, "w1", "patch_missing")
    assert world.freeze("r1", "w1", "--failed", "--accept-incomplete").code == 0
    assert world.saved("r1", "w1")["lib/x.txt"][1] == b"x\n"
    assert world.lease_file("r1", "w1")["candidate"]["files_changed"] == ["good.txt"]


def test_a_submodule_replaced_by_plain_files_or_removed_is_a_change_like_any_other(
    world: World, repo: Repo, lib: Repo
) -> None:
    """ADR-0091 D3: the patch is complete."""
    worker = world.lease("r1", "w1")["w1"]
    worker.git("rm", "-q", "lib")
    worker.write("lib/plain.txt", "vendored\n")
    assert world.freeze("r1", "w1").code == 0
    assert set(world.lease_file("r1", "w1")["candidate"]["files_changed"]) == {".gitmodules", "lib", "lib/plain.txt"}
    assert world.promote("r1").code == 0
    assert (repo.path / "lib/plain.txt").read_text() == "vendored\n"


# Evidence as files -----------------------------------------------------------


def test_evidence_is_private_hashed_and_outside_of_what_is_captured(world: World, repo: Repo) -> None:
    """Design 10, invariants 6 and 23; case 106."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    worker.write("a.log", "ignored\n")
    own = world.state("r1") / "artifacts/w1/report.txt"
    own.write_text("report\n")
    (own.parent / "link").symlink_to("/etc/passwd")
    assert world.freeze("r1", "w1").code == 0
    evidence = world.evidence("r1", "w1")
    assert {path.name for path in evidence.iterdir()} == {"candidate.patch", "manifest.json", "saved.tar"}
    assert {path.stat().st_mode & 0o777 for path in evidence.iterdir()} == {0o600}
    assert evidence.stat().st_mode & 0o777 == 0o700
    manifest = world.manifest("r1", "w1")
    artifacts = by_path(manifest["artifacts"])
    assert artifacts["report.txt"]["bytes"] == 7
    assert "sha256" not in artifacts["link"]
    sha256 = subprocess.run(["sha256sum", evidence / "candidate.patch"], capture_output=True, text=True, check=True)
    assert sha256.stdout.split()[0] == manifest["patch"]["sha256"]


@pytest.mark.parametrize(
    "setting",
    ["diff.noprefix=true", "diff.mnemonicPrefix=true", "color.ui=always", "diff.renames=copies", "core.quotePath=true"],
)
def test_the_operators_own_diff_settings_do_not_reach_the_patch(world: World, repo: Repo, setting: str) -> None:
    """Case 20: the patch is git's plain one whatever the operator likes to see."""
    repo.git("config", "--global", *setting.split("="))
    worker = world.lease("r1", "w1")["w1"]
    (worker.path / "f1.txt").rename(worker.path / "caf\xe9.txt")
    assert world.freeze("r1", "w1").code == 0
    world.round_trip("r1", "w1")


def test_a_split_index_is_read_where_it_lies(world: World, repo: Repo) -> None:
    """Design 7, freeze 4: git finds the shared half beside the index; none is left in the private directory."""
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    worker.git("add", "new.txt")
    worker.git("update-index", "--split-index")
    assert world.freeze("r1", "w1").code == 0
    assert not list((world.state("r1") / "git").glob("sharedindex.*"))
    assert "index_unreadable" not in [note["code"] for note in world.manifest("r1", "w1")["diagnostics"]]

"""Conversions of content: LFS, other filters, line endings, encodings, merge drivers."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import Repo, World, assert_nothing_left, assert_sound

ROT = """
import sys
text = sys.stdin.buffer.read()
lower, upper = b"abcdefghijklmnopqrstuvwxyz", b"nopqrstuvwxyzabcdefghijklm"
sys.stdout.buffer.write(text.translate(bytes.maketrans(lower, upper)))
"""

# git's long-running filter protocol, as gitprotocol-long-running-process describes it.
PROCESS = """
import sys
read, write = sys.stdin.buffer, sys.stdout.buffer
def packet():
    size = int(read.read(4) or b"0", 16)
    return read.read(size - 4) if size else None
def packets():
    found = []
    while (line := packet()) is not None:
        found.append(line)
    return found
def send(*lines):
    for line in lines:
        write.write(b"%04x" % (len(line) + 4) + line)
    write.write(b"0000")
    write.flush()
assert packets()[0] == b"git-filter-client\\n"
send(b"git-filter-server\\n", b"version=2\\n")
packets()
send(b"capability=clean\\n", b"capability=smudge\\n")
while True:
    head = packets()
    if not head:
        break
    content = b"".join(packets())
    names = [line for line in head if line.startswith(b"pathname=")]
    if b"broken" in names[0]:
        send(b"status=error\\n")
        continue
    send(b"status=success\\n")
    out = content.swapcase()
    send(*(out[at : at + 60000] for at in range(0, len(out), 60000)))
    send()
"""


def program(world: World, name: str, source: str) -> str:
    path = world.root / f"{name}.py"
    path.write_text(source)
    return f"{sys.executable} {path}"


def blob(repo: Repo, name: str, at: str = "work") -> bytes:
    return repo.run_git("cat-file", "blob", f"{at}:{name}").stdout


def land(world: World, repo: Repo) -> None:
    """Freeze and promote all workers of r1; the operator's checkout is clean and nothing is left."""
    for path in sorted((world.state("r1") / "workspaces").glob("*.json")):
        frozen = world.freeze("r1", path.stem)
        assert frozen.code == 0, frozen
    answer = world.promote("r1")
    assert answer.code == 0, answer
    assert {record["status"] for record in answer.json["records"]} == {"promoted"}
    assert repo.status() == ""
    assert_nothing_left(world, repo)
    assert_sound(repo)


def pointer(content: bytes) -> bytes:
    digest = hashlib.sha256(content).hexdigest()
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n".encode()


def lfs_object(repo: Repo, content: bytes) -> Path:
    digest = hashlib.sha256(content).hexdigest()
    return repo.path / ".git/lfs/objects" / digest[:2] / digest[2:4] / digest


@pytest.mark.skipif(not shutil.which("git-lfs"), reason="git-lfs is not installed")
def test_lfs_files_are_edited_added_and_landed_as_pointers_with_their_objects_in_the_common_store(
    world: World, repo: Repo
) -> None:
    """Design 6: filter.* with lfs.storage at the common directory, so LFS works, without any network."""
    repo.git("lfs", "install")
    repo.git("lfs", "track", "*.bin")
    old, edited, added = os.urandom(3000), os.urandom(4000), os.urandom(2_000_000)
    repo.write("old.bin", old)
    repo.commit("lfs")
    assert blob(repo, "old.bin") == pointer(old)
    before = repo.snapshot()
    workers = world.lease("r1", "w1", "w2")
    assert {k: v for k, v in repo.snapshot().items() if "exclude" not in k and "lionagi" not in k} == {
        k: v for k, v in before.items() if "exclude" not in k
    }
    for worker in workers.values():
        assert (worker.path / "old.bin").read_bytes() == old
        assert worker.status() == ""
    workers["w1"].write("old.bin", edited)
    workers["w1"].git("add", "old.bin")
    workers["w1"].git("commit", "-qm", "edited in the worktree, cleaned by the worker's own git")
    # The second worker's objects come to the store by the capture alone.
    workers["w2"].write("deep/added.bin", added)
    workers["w2"].write("f1.txt", "plain\n")
    assert not lfs_object(repo, added).exists()
    land(world, repo)
    assert blob(repo, "old.bin") == pointer(edited)
    assert blob(repo, "deep/added.bin") == pointer(added)
    assert blob(repo, "f1.txt") == b"plain\n"
    assert (repo.path / "old.bin").read_bytes() == edited
    assert (repo.path / "deep/added.bin").read_bytes() == added
    for content in (edited, added):
        assert lfs_object(repo, content).read_bytes() == content
    [row] = world.manifest("r1", "w2")["converted"]
    assert (row["path"], row["kept"]) == ("deep/added.bin", "lfs")
    assert not list(world.state("r1").rglob("lfs"))
    assert repo.git("lfs", "fsck") == "Git LFS fsck OK"
    # A pointer whose object is nowhere: refused with the filter's words, and undone.
    lfs_object(repo, added).unlink()
    before = repo.snapshot()
    refused = world.lionwt("lease", "r2", "-w", "w1", "--target", "work", "--json")
    assert (refused.code, refused.error) == (8, "git_failed")
    assert "added.bin" in refused.json["error"]["message"]
    assert "nothing was made" in refused.json["error"]["message"]
    shutil.rmtree(repo.path / ".git/lfs/logs", ignore_errors=True)  # git-lfs writes one of its own
    assert repo.snapshot() == before
    assert_nothing_left(world, repo, "r2")


@pytest.mark.parametrize("protocol", ["clean and smudge", "process"])
def test_a_required_filter_of_the_operators_goes_both_ways(world: World, repo: Repo, protocol: str) -> None:
    """Design 6: programs come from the operator's global scope; capture, checkout and landing use them."""
    if protocol == "process":
        world.config("filter.secret.process", program(world, "process", PROCESS))
    else:
        for way in ("clean", "smudge"):
            world.config(f"filter.secret.{way}", program(world, "rot", ROT))
    world.config("filter.secret.required", "true")
    repo.write(".gitattributes", "*.sec filter=secret\n")
    repo.write("a.sec", "secret\n")
    repo.commit("filtered")
    stored, changed = (b"SECRET\n", b"NEWER\n") if protocol == "process" else (b"frperg\n", b"arjre\n")
    assert blob(repo, "a.sec") == stored
    workers = world.lease("r1", "w1", "w2")
    for worker in workers.values():
        assert (worker.path / "a.sec").read_bytes() == b"secret\n"
        assert worker.status() == ""
    workers["w1"].write("a.sec", "newer\n")
    workers["w2"].write("dir/b.sec", "secret\n")
    land(world, repo)
    assert (repo.path / "a.sec").read_bytes() == b"newer\n"
    assert blob(repo, "a.sec") == changed
    assert blob(repo, "dir/b.sec") == stored
    assert (repo.path / "dir/b.sec").read_bytes() == b"secret\n"
    [row] = world.manifest("r1", "w1")["converted"]
    assert (row["path"], row["kept"], row["sha256"]) == ("a.sec", "saved.tar", hashlib.sha256(b"newer\n").hexdigest())


def test_a_required_filter_whose_program_is_missing_refuses_the_lease_and_leaves_nothing(
    world: World, repo: Repo
) -> None:
    """Case 30: the failure names the filter, is undone whole, and nothing falls back to raw content."""
    repo.write("a.sec", "secret\n")
    repo.commit("raw")
    repo.write(".gitattributes", "*.sec filter=secret\n")
    repo.commit("attributes")
    world.config("filter.secret.smudge", "/nowhere/smudge")
    world.config("filter.secret.required", "true")
    exclude = repo.path / ".git/info/exclude"
    exclude.write_text(exclude.read_text() + "/.worktrees/\n")
    before = repo.snapshot()
    answer = world.lionwt("lease", "r1", "-w", "w1", "-w", "w2", "--target", "work", "--json")
    assert (answer.code, answer.error) == (8, "git_failed")
    assert "secret" in answer.json["error"]["message"] and "a.sec" in answer.json["error"]["message"]
    assert "nothing was made" in answer.json["error"]["message"]
    assert repo.snapshot() == before
    assert_nothing_left(world, repo)
    assert not (world.state("r1") / "workspaces.json").exists()
    # The ids are free again once the filter is there.
    world.config("filter.secret.smudge", "cat")
    world.lease("r1", "w1", "w2", start=False)


@pytest.mark.parametrize("protocol", ["clean", "process"])
def test_a_filter_that_fails_half_way_at_freeze_leaves_the_lease_running(
    world: World, repo: Repo, protocol: str
) -> None:
    """Design 7, freeze 4: a capture that is not whole fails; never a candidate with less in it."""
    if protocol == "process":
        world.config("filter.odd.process", program(world, "process", PROCESS))
    else:
        world.config("filter.odd.clean", f"sh -c 'head -c 3; test ! -e {world.root}/broken'")
        world.config("filter.odd.smudge", "cat")
        (world.root / "broken").touch()
    world.config("filter.odd.required", "true")
    repo.write(".gitattributes", "*.odd filter=odd\n")
    repo.commit("attributes")
    worker = world.lease("r1", "w1")["w1"]
    worker.write("f1.txt", "fine\n")
    worker.write("broken.odd", "content\n")
    file = world.state("r1") / "workspaces/w1.json"
    lease = file.read_bytes()
    index = (repo.path / ".git/worktrees/w1/index").read_bytes()
    refused = world.freeze("r1", "w1")
    assert (refused.code, refused.error) == (4, "patch_missing")
    assert "broken.odd" in refused.json["error"]["message"]
    assert "freeze again" in refused.json["error"]["hint"]
    assert file.read_bytes() == lease
    assert (repo.path / ".git/worktrees/w1/index").read_bytes() == index
    assert (worker.path / "broken.odd").read_text() == "content\n"
    assert not world.evidence("r1", "w1").exists() or list(world.evidence("r1", "w1").iterdir()) == []
    (world.root / "broken").unlink(missing_ok=True)
    (worker.path / "broken.odd").rename(worker.path / "mended.odd")
    land(world, repo)
    assert (repo.path / "f1.txt").read_text() == "fine\n"
    assert blob(repo, "mended.odd") == (b"CONTENT\n" if protocol == "process" else b"con")


def test_line_endings_follow_the_attributes_in_every_worktree(world: World, repo: Repo) -> None:
    """Case 29: eol=crlf, text=auto with core.autocrlf=true, -text; both sides under the run's own settings."""
    world.config("core.autocrlf", "true")
    repo.write(".gitattributes", "* text=auto\n*.bat text eol=crlf\n*.sh text eol=lf\n*.raw -text\n")
    repo.write("a.bat", "one\r\n")
    repo.write("a.sh", "one\n")
    repo.write("a.raw", "one\r\ntwo\n")
    repo.write("a.txt", "one\r\n")
    repo.commit("endings")
    # What was written before the attributes came has LF on disk: let git write it anew.
    for path in repo.path.glob("f*.txt"):
        path.unlink()
    repo.git("checkout", "-q", "--", ".")
    workers = world.lease("r1", "w1", "w2")
    for worker in workers.values():
        assert worker.status() == ""
        for name in ("a.bat", "a.sh", "a.raw", "a.txt", "f1.txt"):
            assert (worker.path / name).read_bytes() == (repo.path / name).read_bytes(), name
    workers["w1"].write("a.bat", "one\r\ntwo\r\n")
    workers["w1"].write("new.txt", "crlf\r\n")
    workers["w2"].write("a.sh", "two\n")
    workers["w2"].write("a.raw", "\r\n\n\r")
    workers["w2"].write("lf.txt", "lf\n")
    land(world, repo)
    assert blob(repo, "a.bat") == b"one\ntwo\n"
    assert (repo.path / "a.bat").read_bytes() == b"one\r\ntwo\r\n"
    assert blob(repo, "new.txt") == b"crlf\n"
    assert (repo.path / "new.txt").read_bytes() == b"crlf\r\n"
    assert (repo.path / "a.sh").read_bytes() == blob(repo, "a.sh") == b"two\n"
    assert (repo.path / "a.raw").read_bytes() == blob(repo, "a.raw") == b"\r\n\n\r"
    assert (repo.path / "lf.txt").read_bytes() == b"lf\r\n"
    assert [row["path"] for row in world.manifest("r1", "w1")["converted"]] == ["a.bat", "new.txt"]


def test_autocrlf_input_of_the_repository_itself_counts(world: World, repo: Repo) -> None:
    """Design 6: core.autocrlf names no program, so the repository's own value is taken."""
    repo.git("config", "core.autocrlf", "input")
    worker = world.lease("r1", "w1")["w1"]
    worker.write("f1.txt", "one\r\n")
    land(world, repo)
    assert blob(repo, "f1.txt") == b"one\n"
    assert (repo.path / "f1.txt").read_bytes() == b"one\n"


def test_ident_encodings_export_subst_and_operators_attributes_survive_a_landing(world: World, repo: Repo) -> None:
    """Design 6: core.attributesFile and info/attributes are in the snapshot; the worker's view is the operator's."""
    world.config("core.attributesFile", str(world.root / "attributes"))
    (world.root / "attributes").write_text("*.wide working-tree-encoding=UTF-16 text\n")
    (repo.path / ".git/info/attributes").write_text("*.id ident\n")
    repo.write(".gitattributes", "*.sub export-subst\n")
    repo.write("a.id", "$Id$\n")
    repo.write("a.wide", "wide é\n".encode("utf-16"))
    repo.write("a.sub", "$Format:%H$\n")
    repo.commit("converted")
    for name in ("a.id", "a.wide"):
        (repo.path / name).unlink()
    repo.git("checkout", "-q", "--", ".")
    workers = world.lease("r1", "w1", "w2")
    for worker in workers.values():
        assert worker.status() == ""
        assert (worker.path / "a.id").read_bytes() == (repo.path / "a.id").read_bytes() != b"$Id$\n"
        assert (worker.path / "a.wide").read_bytes().decode("utf-16") == "wide é\n"
        assert (worker.path / "a.sub").read_bytes() == b"$Format:%H$\n"
    identified = (workers["w1"].path / "a.id").read_text()
    workers["w1"].write("a.id", f"{identified}more\n")
    workers["w1"].write("a.wide", "wider ü\n".encode("utf-16"))
    workers["w2"].write("b.wide", "new ö\n".encode("utf-16"))
    workers["w2"].write("a.sub", "$Format:%H %an$\n")
    land(world, repo)
    assert blob(repo, "a.id") == b"$Id$\nmore\n"
    assert blob(repo, "a.wide") == "wider ü\n".encode()
    assert blob(repo, "b.wide") == "new ö\n".encode()
    assert blob(repo, "a.sub") == (repo.path / "a.sub").read_bytes() == b"$Format:%H %an$\n"
    assert (repo.path / "a.wide").read_bytes().decode("utf-16") == "wider ü\n"
    assert (repo.path / "b.wide").read_bytes().decode("utf-16") == "new ö\n"
    expanded = f"$Id: {repo.head('work:a.id')} $\nmore\n"
    assert (repo.path / "a.id").read_text() == expanded


def test_content_that_an_encoding_cannot_take_fails_the_freeze(world: World, repo: Repo) -> None:
    """Design 7, freeze 4: what cannot be represented is never dropped in silence."""
    repo.write(".gitattributes", "*.wide working-tree-encoding=UTF-16 text\n")
    repo.commit("attributes")
    worker = world.lease("r1", "w1")["w1"]
    worker.write("a.wide", b"\xd8\x00 no byte order mark, and a lone surrogate")
    refused = world.freeze("r1", "w1")
    assert (refused.code, refused.error) == (4, "patch_missing")
    assert "a.wide" in refused.json["error"]["message"]
    assert world.lease_file("r1", "w1")["lease"]["state"] == "running"


def test_merge_union_unites_and_a_driver_of_somebody_elses_is_not_run(world: World, repo: Repo) -> None:
    """Design 7, promote 3: merge=union holds; a merge driver is a program and is not in the snapshot."""
    ran = world.root / "ran"
    world.config("merge.ours.driver", f"touch {ran}")
    repo.write(".gitattributes", "CHANGES merge=union\nf1.txt merge=ours\n*.lock -merge\n")
    repo.write("CHANGES", "first\n")
    repo.write("a.lock", "one\ntwo\nthree\nfour\nfive\n")
    repo.commit("attributes")
    names = ("w1", "w2", "w3", "w4", "w5", "w6")
    workers = world.lease("r1", *names)
    workers["w1"].write("CHANGES", "one\nfirst\n")
    workers["w2"].write("CHANGES", "two\nfirst\n")
    workers["w3"].write("f1.txt", "three\n")
    workers["w4"].write("f1.txt", "four\n")
    workers["w5"].write("a.lock", "ONE\ntwo\nthree\nfour\nfive\n")
    workers["w6"].write("a.lock", "one\ntwo\nthree\nfour\nFIVE\n")
    for name in names:
        assert world.freeze("r1", name).code == 0
    answer = world.promote("r1")
    assert answer.code == 4
    status = {record["lease"]["worker_id"]: record["status"] for record in answer.json["records"]}
    assert status == {
        "w1": "promoted",
        "w2": "promoted",
        "w3": "promoted",
        "w4": "needs_resolution",
        "w5": "promoted",
        "w6": "needs_resolution",
    }
    assert [(entry["worker_id"], entry["code"]) for entry in answer.json["outcomes"]] == [
        ("w4", "merge_conflict"),
        ("w6", "merge_conflict"),
    ]
    assert sorted((repo.path / "CHANGES").read_text().split()) == ["first", "one", "two"]
    assert (repo.path / "f1.txt").read_text() == "three\n"
    assert (repo.path / "a.lock").read_text().startswith("ONE\n")
    assert not ran.exists()
    assert repo.status() == ""
    assert_nothing_left(world, repo)
    assert_sound(repo)


def test_a_filter_that_only_the_repository_names_is_refused_unless_the_operator_trusts_it(
    world: World, repo: Repo
) -> None:
    """Design 6: a worker can write the repository's config; lionwt.toml is the operator's word."""
    ran = world.root / "ran"
    repo.write(".gitattributes", "*.sec filter=local\n")
    repo.write("a.sec", "secret\n")
    repo.commit("attributes")
    repo.git("config", "filter.local.clean", f"touch {ran}; cat")
    repo.git("config", "filter.local.smudge", f"touch {ran}; cat")
    before = repo.snapshot()
    refused = world.lionwt("lease", "r1", "-w", "w1", "--target", "work", "--json")
    assert (refused.code, refused.error) == (3, "filter_untrusted")
    assert "'local'" in refused.json["error"]["message"]
    assert 'trusted_filters = ["local"]' in refused.json["error"]["hint"]
    assert repo.snapshot() == before
    assert not ran.exists()
    world.lionagi_home.mkdir(exist_ok=True)
    (world.lionagi_home / "lionwt.toml").write_text('trusted_filters = ["local"]\n')
    worker = world.lease("r1", "w1", args=("--policy", "merge_validated"))["w1"]
    assert ran.exists()
    worker.write("a.sec", "newer\n")
    land(world, repo)
    assert blob(repo, "a.sec") == b"newer\n"


@pytest.mark.parametrize("command", ["./tools/rot", "tools/rot.py --clean", "python3 rot.py", "sh -c 'exec ./rot.py'"])
def test_a_filter_that_lies_in_the_worktree_is_refused(world: World, repo: Repo, command: str) -> None:
    """Relative to the worktree the program would be the worker's own version of it."""
    repo.commit("programs", **{"rot.py": "x\n", "tools/rot.py": "x\n"})
    world.config("filter.rot.clean", command)
    before = repo.snapshot()
    answer = world.lionwt("lease", "r1", "-w", "w1", "--target", "work", "--json", "--owner-pid", "none")
    assert (answer.code, answer.error) == (3, "filter_untrusted"), answer
    assert "absolute" in answer.json["error"]["hint"]
    assert repo.snapshot() == before
    world.config("filter.rot.clean", "cat")
    world.lease("r1", "w1")

"""What the operator saves in the middle of a landing, at whatever moment, is theirs and stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from lionwt.aside import Aside, note
from tests.conftest import Answer, Repo, World, go_on

NEW = "new line\n" * 50
MINE = "mine, saved in that very moment\n"
RECONCILE = ("reconcile", "r1", "--takeover", "--json")
#: Steps of a landing past its commit point, in their order.
STEPS = ("promote.moved", "promote.index_updated", "promote.set_aside", "promote.files_written", "promote.updated")


@pytest.fixture
def landing(world: World, repo: Repo) -> Repo:
    """A frozen candidate that changes, adds and removes files; returns the operator's repository."""
    repo.commit("more", **{"gone.txt": "gone\n", "deep/er/gone.txt": "gone\n"})
    worker = world.lease("r1", "w1")["w1"]
    for name in ("f1.txt", "f2.txt", "new.txt", "dir/new.txt"):
        worker.write(name, NEW)
    (worker.path / "gone.txt").unlink()
    (worker.path / "deep/er/gone.txt").unlink()
    world.freeze_now("r1", "w1")
    return repo


def written_into(file: TextIO) -> str:
    """Write into a file that is open since before the landing; returns what it holds then."""
    file.write(MINE)
    file.flush()
    file.seek(0)
    return file.read()


def in_place(path: Path) -> None:
    path.write_text(MINE)


def by_rename(path: Path) -> None:
    other = path.with_name(".saving")
    other.write_text(MINE)
    os.replace(other, path)


def of_the_same_size(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.swapcase())


def executable(path: Path) -> None:
    path.chmod(0o755)


def as_a_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("f3.txt")


def as_a_directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "inside.txt").write_text(MINE)


def seen(path: Path) -> object:
    """All that tells one version of an entry from another."""
    if path.is_symlink():
        return os.readlink(path)
    if path.is_dir():
        return {entry.name: seen(entry) for entry in path.iterdir()}
    return (path.stat().st_mode, path.read_bytes()) if path.exists() else None


def require_theirs(world: World, repo: Repo, name: str, theirs: object) -> None:
    """The landing is whole, but for the one path, which is as its owner left it."""
    assert seen(repo.path / name) == theirs
    for other in {"f1.txt", "f2.txt", "new.txt", "dir/new.txt"} - {name}:
        assert (repo.path / other).read_text() == NEW, other
    for other in {"gone.txt", "deep/er/gone.txt"} - {name}:
        assert not (repo.path / other).exists(), other
    assert repo.head() == world.record("r1", "w1")["promoted_commit"]
    assert {line[3:].rstrip("/").split("/inside")[0] for line in repo.status().splitlines()} <= {name}
    assert world.leftovers("r1", repo) == []


def require_told_and_left(answer: Answer, world: World, repo: Repo, name: str, theirs: object) -> None:
    """The same, and the answer names that path."""
    assert (answer.code, answer.error) == (4, "checkout_behind"), answer
    assert name in answer.json["error"]["message"]
    require_theirs(world, repo, name, theirs)


@pytest.mark.parametrize("name", ["f1.txt", "gone.txt", "deep/er/gone.txt"])
@pytest.mark.parametrize("save", [in_place, by_rename, of_the_same_size, executable, as_a_link, as_a_directory])
def test_a_file_that_is_saved_after_the_look_is_not_written_over(
    world: World, landing: Repo, save: Callable[[Path], None], name: str
) -> None:
    """Invariant 14: between the look at a file and the write to it, its owner saves another version."""
    child = world.stopped_at("promote.index_updated", "promote", "r1", "--json")
    save(landing.path / name)
    theirs = seen(landing.path / name)
    require_told_and_left(go_on(child), world, landing, name, theirs)


@pytest.mark.parametrize("name", ["f1.txt", "new.txt", "dir/new.txt"])
@pytest.mark.parametrize("save", [in_place, by_rename, as_a_link, as_a_directory])
@pytest.mark.parametrize("point", ["promote.index_updated", "promote.set_aside"])
def test_a_file_that_appears_where_one_is_about_to_be_written_stays(
    world: World, landing: Repo, save: Callable[[Path], None], name: str, point: str
) -> None:
    """Invariant 14: git makes each file itself, or leaves what it finds."""
    child = world.stopped_at(point, "promote", "r1", "--json")
    (landing.path / name).parent.mkdir(exist_ok=True)
    save(landing.path / name)
    theirs = seen(landing.path / name)
    require_told_and_left(go_on(child), world, landing, name, theirs)


@pytest.mark.parametrize("name", ["a.txt", "new.txt", "z.txt"])
def test_a_file_that_appears_while_git_writes_its_neighbours_stays(world: World, repo: Repo, name: str) -> None:
    """Invariant 14: the last look before each file is git's own; here the filter of one makes another."""
    marker = world.root / "landing"
    made = repo.path / name
    world.config("filter.saving.smudge", f"sh -c 'if [ -e {marker} ]; then printf mine > {made}; fi; cat'")
    world.config("filter.saving.clean", "cat")
    repo.commit("a filter", **{".gitattributes": "new.txt filter=saving\n"})
    worker = world.lease("r1", "w1")["w1"]
    for new in ("a.txt", "new.txt", "z.txt"):
        worker.write(new, NEW)
    world.freeze_now("r1", "w1")
    marker.touch()
    answer = world.promote("r1")
    if name == "a.txt":  # it had been written already: the edit of a new version, like any
        assert answer.code == 0, answer
    else:
        assert (answer.code, answer.error) == (4, "checkout_behind"), answer
    assert made.read_text() == "mine"
    assert repo.status().split() in (["M", name], [])
    assert world.leftovers("r1", repo) == []


@pytest.mark.parametrize("name", ["f1.txt", "gone.txt"])
@pytest.mark.parametrize("point", ["promote.set_aside", "promote.files_written"])
def test_what_an_editor_still_writes_into_the_old_file_is_put_back(
    world: World, landing: Repo, name: str, point: str
) -> None:
    """Invariant 14: a file that is open while a landing replaces it is written to afterwards."""
    with open(landing.path / name, "r+") as file:
        child = world.stopped_at(point, "promote", "r1", "--json")
        theirs = written_into(file)
        answer = go_on(child)
    assert (answer.code, answer.error) == (4, "checkout_behind"), answer
    assert (landing.path / name).read_text() == theirs and MINE in theirs
    assert world.leftovers("r1", landing) == []


def test_an_older_and_a_newer_version_of_the_operators_are_both_kept(world: World, landing: Repo) -> None:
    """Invariant 14: where two versions are theirs, the newer stands and the older is named."""
    with open(landing.path / "f1.txt", "r+") as file:
        child = world.stopped_at("promote.files_written", "promote", "r1", "--json")
        file.write("the older\n")
        file.flush()
        by_rename(landing.path / "f1.txt")
        answer = go_on(child)
    assert (answer.code, answer.error) == (4, "checkout_behind"), answer
    assert (landing.path / "f1.txt").read_text() == MINE
    (place,) = (landing.path / ".git").glob("lionwt-*.aside")
    assert (place / "f1.txt").read_text().startswith("the older\n")
    assert str(place) in answer.json["error"]["message"]


@pytest.mark.parametrize("save", [None, in_place, by_rename, as_a_link, as_a_directory])
@pytest.mark.parametrize("point", STEPS)
def test_what_is_saved_after_a_crash_in_the_middle_of_a_landing_stays(
    world: World, landing: Repo, point: str, save: Callable[[Path], None] | None
) -> None:
    """Design 8: repaired forward, where a file holds the old, the new or a torn version, wherever it lies."""
    assert world.promote("r1", env={"LIONWT_FAULT": f"{point}:kill"}).code == -9
    name = "f1.txt" if save is not None else ""
    if save is not None:
        save(landing.path / name)
    theirs = seen(landing.path / name) if save is not None else seen(landing.path)
    answer = world.lionwt(*RECONCILE)
    if save is None:
        assert answer.code == 0 and landing.status() == "", answer
        require_theirs(world, landing, "", seen(landing.path))
    else:
        assert answer.code == 4, answer
        require_theirs(world, landing, name, theirs)
    again = world.lionwt(*RECONCILE)
    assert (again.code, again.json["steps"]) == (answer.code, [])


def test_what_was_written_into_a_file_that_a_dead_landing_had_moved_is_put_back(world: World, landing: Repo) -> None:
    """Invariant 14: the moved file is no longer the old version, so it is the operator's."""
    with open(landing.path / "f1.txt", "r+") as file:
        assert world.promote("r1", env={"LIONWT_FAULT": "promote.files_written:kill"}).code == -9
        theirs = written_into(file)
    assert world.lionwt(*RECONCILE).code == 4
    assert (landing.path / "f1.txt").read_text() == theirs
    assert world.leftovers("r1", landing) == []


@pytest.mark.parametrize("point", ["promote.set_aside", "promote.files_written"])
def test_a_reconcile_that_dies_with_files_moved_is_finished_by_the_next(
    world: World, landing: Repo, point: str
) -> None:
    """Invariants 19 and 20; also where somebody has removed the lock in between."""
    assert world.promote("r1", env={"LIONWT_FAULT": "promote.set_aside:kill"}).code == -9
    (landing.path / ".git/index.lock").unlink()
    assert world.lionwt(*RECONCILE, env={"LIONWT_FAULT": f"{point}:kill"}).code == -9
    (landing.path / ".git/index.lock").unlink()
    assert world.lionwt(*RECONCILE).code == 0
    require_theirs(world, landing, "", seen(landing.path))
    assert landing.status() == ""


@pytest.mark.parametrize("how", ["--mixed", "--soft", "--hard"])
def test_a_target_that_was_reset_in_the_middle_of_a_landing_has_its_old_files(
    world: World, landing: Repo, how: str
) -> None:
    """Design 8: the operator took the move back; what a landing had moved is where it was."""
    before = landing.head()
    with open(landing.path / "f2.txt", "r+") as file:
        assert world.promote("r1", env={"LIONWT_FAULT": "promote.set_aside:kill"}).code == -9
        (landing.path / ".git/index.lock").unlink()
        landing.git("reset", "-q", how, before)
        file.write(MINE)
    answer = world.lionwt(*RECONCILE)
    assert answer.code == 4 and world.record("r1", "w1")["status"] == "needs_resolution", answer
    theirs = (landing.path / "f2.txt").read_text()
    if how == "--hard":  # two versions: the one that was reset stands, the one in the editor is named
        (place,) = (landing.path / ".git").glob("lionwt-*.aside")
        assert MINE in (place / "f2.txt").read_text() and str(place) in world.lease_bytes("r1", "w1").decode()
        return
    assert MINE in theirs and (landing.path / "gone.txt").read_text() == "gone\n"
    landing.git("reset", "-q", "--mixed", before)
    assert landing.status() == " M f2.txt" and world.leftovers("r1", landing) == []


@pytest.mark.parametrize("ending", ["lf", "crlf"])
@pytest.mark.parametrize("point", ["promote.set_aside", "promote.files_written"])
def test_a_checkout_that_left_the_target_in_the_middle_of_a_landing_gets_nothing_old_back(
    world: World, repo: Repo, point: str, ending: str
) -> None:
    """Design 8: the operator has gone elsewhere by force; what a landing had moved is git's, and goes."""
    repo.git("switch", "-q", "main")
    repo.commit("endings", **{".gitattributes": f"*.txt text eol={ending}\n"})
    repo.git("add", "--renormalize", ".")
    repo.git("switch", "-q", "work")
    repo.git("merge", "-q", "main")
    repo.git("rm", "-q", "-r", "--cached", ".")
    repo.git("reset", "-q", "--hard")
    worker = world.lease("r1", "w1")["w1"]
    worker.write("f1.txt", NEW)
    worker.write("new.txt", NEW)
    worker.write("dir/new.txt", NEW)
    (worker.path / "f2.txt").unlink()
    world.freeze_now("r1", "w1")
    landing = repo
    assert world.promote("r1", env={"LIONWT_FAULT": f"{point}:kill"}).code == -9
    (landing.path / ".git/index.lock").unlink()
    landing.git("switch", "-q", "-f", "main")
    landing.git("clean", "-q", "-f", "-d", "--", "new.txt", "dir")
    assert world.lionwt(*RECONCILE).code == 0
    assert landing.git("rev-parse", "--abbrev-ref", "HEAD").strip() == "main"
    assert landing.status() == "" and world.leftovers("r1", landing) == []


def test_only_what_is_someone_elses_is_said_to_be(world: World, landing: Repo) -> None:
    """Design 5: the answer names the one file; and what an editor wrote late elsewhere is put back all the same."""
    with open(landing.path / "f2.txt", "r+") as file:
        child = world.stopped_at("promote.set_aside", "promote", "r1", "--json")
        (landing.path / "new.txt").write_text(MINE)
        theirs = written_into(file)
        answer = go_on(child)
    assert (answer.code, answer.error) == (4, "checkout_behind"), answer
    assert "2 files of the checkout hold something else" in answer.json["error"]["message"]
    assert (landing.path / "new.txt").read_text() == MINE and (landing.path / "f2.txt").read_text() == theirs
    assert (landing.path / "f1.txt").read_text() == NEW and world.leftovers("r1", landing) == []


def test_a_file_that_comes_where_a_directory_is_to_be_stops_nothing_else(world: World, repo: Repo) -> None:
    """Invariant 14: git gives up at it; what comes after it is written all the same."""
    marker = world.root / "landing"
    world.config("filter.saving.smudge", f"sh -c 'if [ -e {marker} ]; then printf mine > {repo.path}/room; fi; cat'")
    world.config("filter.saving.clean", "cat")
    repo.commit("a filter", **{".gitattributes": "new.txt filter=saving\n"})
    worker = world.lease("r1", "w1")["w1"]
    for name in ("f1.txt", "new.txt", "room/new.txt", "z.txt"):
        worker.write(name, NEW)
    world.freeze_now("r1", "w1")
    marker.touch()
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "checkout_behind"), answer
    assert (repo.path / "room").read_text() == "mine" and (repo.path / "z.txt").read_text() == NEW
    assert "1 file of the checkout holds" in answer.json["error"]["message"]
    assert world.leftovers("r1", repo) == []


@pytest.mark.parametrize("save", [in_place, as_a_link])
@pytest.mark.parametrize("change", ["bumped", "removed"])
def test_what_has_taken_a_submodules_place_is_in_the_way(
    world: World, repo: Repo, change: str, save: Callable[[Path], None]
) -> None:
    """Invariant 13 and 14: git does not look at a submodule's path; the operator's file there stops the landing."""
    first = repo.head()
    repo.git("update-index", "--add", "--cacheinfo", f"160000,{first},module")
    repo.git("commit", "-q", "-m", "a submodule")
    (repo.path / "module").mkdir(exist_ok=True)
    worker = world.lease("r1", "w1")["w1"]
    if change == "bumped":
        worker.git("update-index", "--cacheinfo", f"160000,{repo.head()},module")
    else:
        worker.git("rm", "-q", "--cached", "module")
        (worker.path / "module").rmdir()
    worker.git("commit", "-q", "-m", change)
    world.freeze_now("r1", "w1")
    (repo.path / "module").rmdir()
    save(repo.path / "module")
    before = repo.snapshot()
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "checkout_blocked"), answer
    assert repo.snapshot() == before


def test_a_link_that_becomes_a_directory_is_not_looked_through(world: World, repo: Repo) -> None:
    """Invariant 14: what lies behind a link is not at the path, neither to be moved nor to be compared."""
    repo.commit("a link", **{"other/x.txt": "other\n"})
    (repo.path / "d").symlink_to("other")
    repo.git("add", "d")
    repo.git("commit", "-q", "-m", "d")
    worker = world.lease("r1", "w1")["w1"]
    (worker.path / "d").unlink()
    worker.write("d/x.txt", NEW)
    world.freeze_now("r1", "w1")
    assert world.promote("r1", env={"LIONWT_FAULT": "promote.set_aside:kill"}).code == -9
    assert world.lionwt(*RECONCILE).code == 0
    assert (repo.path / "d/x.txt").read_text() == NEW and (repo.path / "other/x.txt").read_text() == "other\n"
    assert repo.status() == "" and world.leftovers("r1", repo) == []


def test_a_directory_that_keeps_files_is_never_made_anew(world: World, repo: Repo) -> None:
    """Invariant 14: its mode and whoever stands in it stay, though all its files are replaced or removed."""
    repo.commit("more", **{"dir/a.txt": "a\n", "dir/b.txt": "b\n"})
    (repo.path / "dir").chmod(0o700)
    before = (repo.path / "dir").stat()
    worker = world.lease("r1", "w1")["w1"]
    worker.write("dir/b.txt", NEW)
    (worker.path / "dir/a.txt").unlink()
    world.freeze_now("r1", "w1")
    assert world.promote("r1").code == 0
    now = (repo.path / "dir").stat()
    assert (now.st_ino, now.st_mode) == (before.st_ino, before.st_mode) and os.listdir(repo.path / "dir") == ["b.txt"]


def test_a_new_file_that_is_staged_below_a_directory_that_becomes_a_file_is_in_the_way(
    world: World, repo: Repo
) -> None:
    """Invariant 13 and 14: git would drop it from the index without a word."""
    repo.commit("more", **{"d/a.txt": "a\n"})
    worker = world.lease("r1", "w1")["w1"]
    (worker.path / "d/a.txt").unlink()
    (worker.path / "d").rmdir()
    worker.write("d", NEW)
    world.freeze_now("r1", "w1")
    repo.write("d/staged.txt", MINE)
    repo.git("add", "d/staged.txt")
    before = repo.snapshot()
    answer = world.promote("r1")
    assert (answer.code, answer.error) == (4, "checkout_blocked") and "d/staged.txt" in answer.out, answer
    assert repo.snapshot() == before


def test_an_empty_directory_makes_room(world: World, landing: Repo) -> None:
    """As git does: an empty directory is no work of anybody's."""
    (landing.path / "new.txt").mkdir()
    assert world.promote("r1").code == 0
    assert (landing.path / "new.txt").read_text() == NEW


@pytest.mark.parametrize("beside", [False, True])
def test_a_place_that_already_keeps_a_version_keeps_it(tmp_path: Path, beside: bool) -> None:
    """Invariants 14 and 20: killed in the middle of an exchange, and again, neither version is lost."""
    root, place = tmp_path / "root", tmp_path / "place"
    (place / ".git" if beside else place).mkdir(parents=True)
    root.mkdir()
    kept = place / ".git/f" if beside else place / "f"
    kept.write_text("kept")
    (root / "f").write_text("newer")
    aside = Aside(os.fsencode(root), os.fsencode(place))
    if beside:
        assert aside.give_back([b"f"], lambda _: set(), lambda _: set()) == [os.fsencode(place)]
        assert kept.read_text() == "kept"
        (root / "f").unlink()
        assert aside.give_back([b"f"], lambda _: set(), lambda _: set()) == []
        assert (root / "f").read_text() == "kept"
    else:
        noted = note(os.fsencode(root), [b"f"])
        assert not aside.take(b"f", noted[b"f"])
        assert kept.read_text() == "kept" and (root / "f").read_text() == "newer"


def test_a_moved_file_that_is_written_to_after_it_was_taken_for_the_old_one_stays(tmp_path: Path) -> None:
    """Invariant 14: one git looks at all moved files, and an editor may still hold one of them open."""
    root, place = tmp_path / "root", tmp_path / "place"
    root.mkdir()
    place.mkdir()
    (place / "f").write_text("old")

    class Saving(list[bytes]):
        def __contains__(self, path: object) -> bool:
            (place / "f").write_text("written late")
            return False

    aside = Aside(os.fsencode(root), os.fsencode(place))
    assert aside.give_back(Saving(), lambda _: {b"f"}, lambda _: set()) == [os.fsencode(place)]
    assert (place / "f").read_text() == "written late"

"""One worker's whole life, end to end."""

from __future__ import annotations

from tests.conftest import Repo, World


def test_a_worker_is_leased_started_frozen_and_landed_with_a_no_ff_merge(world: World, repo: Repo) -> None:
    base = repo.head()
    worker = world.lease("r1", "w1")["w1"]
    worker.write("new.txt", "new\n")
    assert world.freeze("r1", "w1").code == 0
    answer = world.promote("r1")
    assert answer.code == 0, answer
    record = answer.json["records"][0]
    assert record["status"] == "promoted"
    assert repo.head("work") == record["promoted_commit"]
    parents = repo.git("rev-list", "--parents", "-1", "work").split()[1:]
    assert parents[0] == base
    assert len(parents) == 2
    assert (repo.path / "new.txt").read_text() == "new\n"
    assert repo.status() == ""
    assert not worker.path.exists()
    assert repo.git("for-each-ref", "refs/heads/lionagi", "refs/lionwt") == ""
    assert repo.git("worktree", "list").count("\n") == 0

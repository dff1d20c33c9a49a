"""What must follow every crash: reconcile, all invariants, and reconcile again with nothing to do."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tests.conftest import Answer
from tests.crash.scenes import Stage

#: Exit codes that are documented and no bug (design section 5).
DOCUMENTED = frozenset({0, 3, 4, 5, 6, 7, 8})


def recover(stage: Stage, ends: Collection[str], about: str, *, again: tuple[str, ...] = ()) -> Answer:
    """Reconcile after a crash and prove that everything is as it must be; returns what reconcile answered.

    ``ends`` are the statuses that a lease may have afterwards. A run that was
    never opened has nothing to reconcile: then the command ``again`` must work
    as if nothing had been.
    """
    world = stage.world
    stage.check(about=about)
    answer = world.reconcile()
    if answer.error == "run_unknown" and again:
        told = world.lionwt(*again)
        assert told.code in (0, 8), f"[{about}] the same command again: {told}"
        answer = world.reconcile()
        if answer.error == "run_unknown":
            stage.check(settled=True, about=about)
            return answer
    require_ended(stage, answer, ends, about)
    before = world.state_of()
    second = world.reconcile()
    changed = sorted(name for name in {*before, *world.state_of()} if before.get(name) != world.state_of().get(name))
    assert changed == [], f"[{about}] 19: a second reconcile changed {changed}"
    assert (second.code, second.json["steps"]) == (answer.code, []), f"[{about}] 19: {answer} then {second}"
    stage.check(settled=True, about=about)
    return answer


def require_ended(stage: Stage, answer: Answer, ends: Collection[str], about: str) -> None:
    """Invariant 20: every lease is terminal, in a way that this crash may end."""
    told = answer.json
    assert answer.code in DOCUMENTED, f"[{about}] {answer}"
    assert told["pending"] == [] and told["findings"] == [], f"[{about}] 20: {answer}"
    wrong = {lease.name: _status(lease.record) for lease in stage.checker.leases() if _status(lease.record) not in ends}
    assert wrong == {}, f"[{about}] 20: {wrong} after {answer}"


def _status(record: dict[str, Any] | None) -> str | None:
    return None if record is None else str(record["status"])

"""The lease files of a repository's runs, read without lionwt, and what can be said of them alone."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

STATES: Final = ("allocated", "running", "frozen", "terminal")
ARROWS: Final = {
    ("allocated", "running"),
    ("running", "frozen"),
    ("frozen", "terminal"),
    ("allocated", "terminal"),
    ("running", "terminal"),
}
STATUSES: Final = ("promoted", "discarded", "retained", "needs_resolution", "teardown_failed")
#: A record is written once; a teardown that completes later replaces its status by one of these.
REPLACED_BY: Final = {
    "teardown_failed": {"teardown_failed", "promoted", "discarded", "needs_resolution"},
    "retained": {"needs_resolution", "teardown_failed"},
}


@dataclass
class Lease:
    """One lease file as it lies on disk."""

    run: str
    worker: str
    path: Path
    content: bytes
    data: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.run}/{self.worker}"

    @property
    def intent(self) -> str | None:
        intent = self.data["intent"]
        return None if intent is None else intent["kind"]

    @property
    def record(self) -> dict[str, Any] | None:
        record: dict[str, Any] | None = self.data["record"]
        return record

    @property
    def landing(self) -> dict[str, Any] | None:
        """The journalled landing, intended or done."""
        for place in (self.data["outcome"], self.data["intent"]):
            if place is not None and place.get("landing"):
                found: dict[str, Any] = place["landing"]
                return found
        return None


def runs_of(home: Path) -> list[Path]:
    """The state root of every run."""
    runs = home / "runs"
    return sorted(runs.iterdir()) if runs.is_dir() else []


def read_leases(home: Path, found: list[str]) -> Iterator[Lease]:
    for state in runs_of(home):
        for path in sorted((state / "workspaces").glob("*.json")) if (state / "workspaces").is_dir() else []:
            if path.name.startswith("."):
                continue
            try:
                content = path.read_bytes()
                data = json.loads(content)
                yield Lease(data["lease"]["run_id"], data["lease"]["worker_id"], path, content, data)
            except (OSError, ValueError, KeyError, TypeError) as error:
                found.append(f"1: {path} is not a whole lease file: {error!r}")


def check_files(leases: list[Lease]) -> Iterator[str]:
    for lease in leases:
        data, name = lease.data, lease.name
        if data["schema"] != "lionwt/lease@1":
            yield f"1: {name} has schema {data['schema']}"
        if not lease.content.isascii():
            yield f"1: {name} is not ASCII"
        if lease.path.stem != lease.worker or lease.path.parent.parent.name != lease.run:
            yield f"1: {lease.path} speaks of {name}"
        states = [step["state"] for step in data["history"]]
        if not states or states[0] != "allocated" or states[-1] != data["lease"]["state"]:
            yield f"1: {name} is {data['lease']['state']}, its history {states}"
        for arrow in itertools.pairwise(states):
            if arrow not in ARROWS:
                yield f"1: {name} went {arrow[0]} -> {arrow[1]}"
        if (lease.record is not None) != (data["lease"]["state"] == "terminal"):
            yield f"1: {name} is {data['lease']['state']} with record {lease.record is not None}"
        if data["lease"]["state"] == "frozen" and data["candidate"] is None:
            yield f"1: {name} is frozen without a candidate"


def expire(path: Path) -> Lease:
    """Let the time of a retained lease come: the clock cannot be moved, so what it is compared with is."""
    data = json.loads(path.read_bytes())
    assert data["record"]["status"] == "retained"
    past = time.time() - 10
    data["serial"] += 1
    data["policy"]["retention_until"] = data["record"]["retention_until"] = past
    data["record"]["completed_at"] = past - 10
    content = json.dumps(data).encode()
    path.write_bytes(content)
    return Lease(path.parent.parent.name, path.stem, path, content, data)


def check_changes(known: dict[str, Lease], leases: list[Lease]) -> Iterator[str]:
    """Compared with the look before: 1, 3, 4, and that what is final stays."""
    now = {lease.name: lease for lease in leases}
    for name, before in known.items():
        after = now.get(name)
        if after is None:
            if before.intent != "allocate":
                yield f"3: the file of {name} is gone, which was {before.data['lease']['state']}"
            continue
        if after.content != before.content and after.data["serial"] <= before.data["serial"]:
            yield f"1: {name} was written, serial {before.data['serial']} -> {after.data['serial']}"
        for key in ("base_sha", "worktree_path", "branch_name", "target_branch", "created_at", "artifact_path"):
            if after.data["lease"][key] != before.data["lease"][key]:
                yield f"4: {key} of {name} changed"
        if STATES.index(after.data["lease"]["state"]) < STATES.index(before.data["lease"]["state"]):
            yield f"1: {name} went back from {before.data['lease']['state']} to {after.data['lease']['state']}"
        if before.data["candidate"] is not None and after.data["candidate"] != before.data["candidate"]:
            yield f"6: the candidate of {name} changed"
        yield from _check_record_change(name, before.record, after.record)


def _check_record_change(name: str, before: dict[str, Any] | None, after: dict[str, Any] | None) -> Iterator[str]:
    if before is None or before == after:
        return
    if after is None:
        yield f"1: the record of {name} is gone"
    elif after["status"] not in REPLACED_BY.get(before["status"], ()):
        yield f"1: the record of {name} changed from {before['status']} to {after['status']}"
    elif before["promoted_commit"] and after["promoted_commit"] != before["promoted_commit"]:
        yield f"11: the landing of {name} was forgotten"


def check_conditions(lease: Lease) -> Iterator[str]:
    """9: what landed had succeeded, with every declared validation green."""
    candidate = lease.data["candidate"]
    green = {result["name"] for result in candidate["validations"] if result["passed"]}
    red = {result["name"] for result in candidate["validations"] if not result["passed"]}
    if not candidate["worker_succeeded"] or candidate["cancelled"] or red:
        yield f"9: {lease.name} landed and had not succeeded"
    if missing := set(lease.data["required_validations"]) - green:
        yield f"9: {lease.name} landed without {missing}"
    if lease.data["policy"]["completion"] != "merge_validated":
        yield f"12: {lease.name} landed under {lease.data['policy']['completion']}"

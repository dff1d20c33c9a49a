"""The leases of one orchestration, held through the ``lionwt`` command (ADR-0091 D2, D3).

Every step is a command that can be repeated by hand: lease, start, freeze,
promote. lionagi's own run id, session id and artifact root are used. A step
that has begun is never abandoned: a cancellation waits until it is done, so
that no lease is made which nobody remembers; whatever a worker did, its lease
is frozen, and at the end of the run all of them are completed in dependency
order.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio

from lionwt import answers
from lionwt.errors import CODES, LionwtError, from_os_error, worst
from lionwt.lionagi.launch import Wishes
from lionwt.words import count

T = TypeVar("T")

#: What a verdict says of a worker where nothing else does.
_ENDED: Final = {"--failed": "; it failed", "--cancelled": "; it was cancelled"}

#: The worker that plans, and in a flow synthesises.
ORCHESTRATOR: Final = "orchestrator"


@dataclass(frozen=True)
class Held:
    """One worker's lease: where it works, where it leaves artifacts, who it is, what it must not be given."""

    worker_id: str
    worktree: Path
    artifacts: Path
    pins: Mapping[str, str]
    checkouts: tuple[Path, ...]


@dataclass
class Leases:
    """What one orchestration holds; ``checkouts`` are the operator's and the main worktree."""

    run_id: str
    session_id: str
    home: Path
    checkouts: tuple[Path, ...]
    wishes: Wishes
    open: dict[str, Held] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    held: list[str] = field(default_factory=list)
    changed: dict[str, int] = field(default_factory=dict)
    _asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    _ended: dict[str, str] = field(default_factory=dict)
    _troubles: dict[str, LionwtError] = field(default_factory=dict)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def name(self, wanted: str) -> str:
        """``wanted``, or with a number what has not been used yet: a pair of run and worker is used once."""
        found, number = wanted, 1
        while found.casefold() in self.used:
            number += 1
            found = f"{wanted}-{number}"
        self.used.add(found.casefold())
        return found

    async def lease(self, worker_id: str, after: Sequence[str] = ()) -> Held:
        """Allocate; it is remembered as open before anything else can happen.

        Workers that begin together are leased in one call, in their order: that
        is quicker, and what lands first is not a matter of chance.
        """
        asked = (worker_id, tuple(after))
        self._asked.append(asked)
        await asyncio.sleep(0)
        async with self._turn:
            if asked in self._asked:
                together = [entry for entry in self._asked if entry[1] == asked[1]]
                self._asked = [entry for entry in self._asked if entry not in together]
                await in_a_thread(functools.partial(self._lease, [entry[0] for entry in together], asked[1]))
        if worker_id not in self.open:
            raise self._troubles[worker_id]
        return self.open[worker_id]

    def _lease(self, workers: Sequence[str], after: Sequence[str]) -> None:
        words = ["lease", self.run_id, *(word for worker_id in workers for word in ("-w", worker_id))]
        words += ["--session", self.session_id, "--repo", str(self.checkouts[0]), "--owner-pid", str(os.getpid())]
        words += [*self._opening(), *(word for predecessor in after for word in ("--after", predecessor))]
        try:
            answer = self._run(*words)
        except LionwtError as error:
            if len(workers) == 1:
                self.note(workers[0], error)
            else:  # all or none: whoever is not in the way gets one
                for worker_id in workers:
                    self._lease([worker_id], after)
            return
        for lease, binding in zip(answer["leases"], answer["bindings"], strict=True):
            held = Held(
                worker_id=lease["worker_id"],
                worktree=Path(lease["worktree_path"]),
                artifacts=Path(lease["artifact_path"]),
                pins=dict(binding["env"]),
                checkouts=self.checkouts,
            )
            self.open[held.worker_id] = held
            self.held.append(held.worker_id)
            held.artifacts.mkdir(parents=True, exist_ok=True)

    def _opening(self) -> list[str]:
        """What the run is opened with; repeated equal, it is what later calls may say as well."""
        wishes = self.wishes
        words = ["--target", wishes.target] if wishes.target else []
        words += ["--policy", wishes.policy] if wishes.policy else []
        words += ["--retain-for", wishes.retain_for] if wishes.retain_for and not self.held else []
        for check in wishes.check:
            words += ["--require", check.partition("=")[0]]
        for check in wishes.check_merged:
            words += ["--check-merged", check]
        if wishes.check_merged and wishes.check_timeout:
            words += ["--check-timeout", wishes.check_timeout]
        return words

    def note(self, worker_id: str, error: BaseException) -> None:
        """Keep lionwt's own reason for a worker's end, the first one, to be told: lionagi says only that it failed."""
        if isinstance(error, LionwtError):
            self._troubles.setdefault(worker_id, error)

    async def start(self, held: Held, granted: Mapping[str, Any]) -> None:
        """allocated → running, only when what was installed is the lease's binding."""
        grants = json.dumps(granted)
        await in_a_thread(
            functools.partial(self._run, "start", self.run_id, held.worker_id, "--grants", "-", says=grants)
        )

    async def freeze(self, held: Held, verdict: str) -> None:
        """Stop the worker and capture what it did; raises what stands in the way."""
        words = ["freeze", self.run_id, held.worker_id, verdict]
        if verdict == "--succeeded":
            for check in self.wishes.check:
                words += ["--check", check]
            if self.wishes.check and self.wishes.check_timeout:
                words += ["--check-timeout", self.wishes.check_timeout]
        if self.wishes.stop_after:
            words += ["--stop-after", self.wishes.stop_after]
        await in_a_thread(functools.partial(self._freeze, held.worker_id, words))

    def _freeze(self, worker_id: str, words: Sequence[str]) -> None:
        answer = self._run(*words)
        self._ended[worker_id] = _ENDED.get(words[3], "")
        self.changed[worker_id] = len((answer["candidate"] or {}).get("files_changed", ()))
        self.open.pop(worker_id, None)

    async def finish(self) -> int:
        """End what is still open, and complete every candidate: in dependency order, else as they were leased.

        What cannot be frozen (its worker removed its worktree) is ended as after a crash, when the others have
        had their turn. Returns promote's exit code.
        """
        codes = []
        for held in list(self.open.values()):
            try:
                words = ["freeze", self.run_id, held.worker_id, "--failed", "--accept-incomplete"]
                await in_a_thread(functools.partial(self._freeze, held.worker_id, words))
            except LionwtError as error:
                codes.append(error.exit_code)
                tell(error)
        if self.open:
            await in_a_thread(functools.partial(self._ask, "promote", self.run_id))
            codes.append(await in_a_thread(self._reconcile))
        if self.held:
            codes.append(await in_a_thread(self._promote))
        return worst(codes)

    def _reconcile(self) -> int:
        answer = self._ask("reconcile", self.run_id, "--takeover")
        for finding in answer.get("findings", []):
            answers.warn(f"{finding['message']} [{finding['code']}]")
        for entry in answer.get("pending", []):
            answers.warn(f"{entry['worker_id']}: {entry['message']} [{entry['code']}]")
        return int(answer["exit_code"])

    def _promote(self) -> int:
        answer = self._ask("promote", self.run_id)
        reasons = {entry["worker_id"]: f"; {entry['message']}" for entry in answer.get("outcomes", [])}
        told = {record["lease"]["worker_id"]: self._became(record) for record in answer.get("records", [])}
        told |= {entry["worker_id"]: f"pending; {entry['message']}" for entry in answer.get("pending", [])}
        for worker_id in dict.fromkeys((*self.held, *self._troubles)):
            if worker_id not in self.held:
                told[worker_id] = "had no lease"
            if worker_id in told:
                trouble = self._troubles.get(worker_id)
                why = f"; {_said(trouble)}" if trouble else reasons.get(worker_id) or self._ended.get(worker_id, "")
                answers.warn(f"{worker_id}: {told[worker_id]}{why}")
        if not told and answer["error"] is not None:
            answers.warn(f"{answer['error']['message']} [{answer['error']['code']}]")
        answers.warn(f"what became of every worker: lionwt status {self.run_id}")
        return int(answer["exit_code"])

    def _became(self, record: Mapping[str, Any]) -> str:
        """What became of a worker, and where what it did is kept."""
        if record["promoted_commit"]:
            return f"{record['status']} as {record['promoted_commit'][:12]} on {record['lease']['target_branch']}"
        changed = self.changed.get(record["lease"]["worker_id"])
        if changed == 0:
            return f"{record['status']}, it changed nothing"
        if record["patch_ref"] is None:
            return str(record["status"])
        patch = Path(record["lease"]["artifact_path"]).parent / record["patch_ref"]
        return f"{record['status']}, the patch of {count(changed or 0, 'file')} is kept in {patch}"

    def _run(self, *words: str, says: str | None = None) -> dict[str, Any]:
        """The answer of a command that did what was asked; raises its refusal."""
        answer = self._ask(*words, says=says)
        error = answer["error"]
        if error is None:
            return answer
        code = error["code"] if error["code"] in CODES else "bug"
        message = f"{error['message']} (lionwt {shlex.join(words)})"
        raise LionwtError(code, message, hint=error["hint"])

    def _ask(self, *words: str, says: str | None = None) -> dict[str, Any]:
        # In a session of its own: Ctrl-C is for lionagi, which then ends its workers in order.
        try:
            done = subprocess.run(
                [sys.executable, "-m", "lionwt", *words, "--json"],
                cwd="/",
                env=self._environment(),
                input=says,
                stdin=subprocess.DEVNULL if says is None else None,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                check=False,
            )
        except OSError as error:
            raise from_os_error(error, f"lionwt {shlex.join(words)} could not be started") from error
        try:
            return dict(json.loads(done.stdout))
        except ValueError:
            raise LionwtError(
                "bug", f"lionwt {shlex.join(words)} gave no answer (exit code {done.returncode})"
            ) from None

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if name not in ("LIONAGI_WORKER_ID", "LIONAGI_RUN_ID")
        }
        return {**kept, "LIONAGI_HOME": str(self.home)}


def tell(error: LionwtError) -> None:
    """Say a refusal and what to type next on stderr."""
    answers.warn(_said(error))


def _said(error: LionwtError) -> str:
    return f"{error.message} [{error.code}]" + (f"; {error.hint}" if error.hint else "")


async def in_a_thread(function: Callable[[], T]) -> T:
    """Run a step in a thread, to its end."""
    return await to_its_end(asyncio.to_thread(function))


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Wait for ``work``, however often the waiting is cancelled; that is raised when the work is done."""
    job = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not job.done():
        try:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([job])
        except asyncio.CancelledError as cancellation:
            cancelled = cancellation
    if cancelled is not None:
        job.exception()  # has been looked at
        raise cancelled
    return job.result()

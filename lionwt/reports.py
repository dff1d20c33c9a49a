"""What a verb did, as an answer: a payload for programs, lines for people, commands to type next.

Nothing is decided here and nothing is looked up: what a verb returned is put
into words. A command in ``next`` can be typed as it stands.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from lionwt import words
from lionwt.answers import Answer, Line
from lionwt.errors import LionwtError, worst
from lionwt.records import Binding, plain

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from lionwt.findings import Finding
    from lionwt.promote import Completion, Pending
    from lionwt.readmodel import Row
    from lionwt.reap import Reaping
    from lionwt.reconcile import Reconciliation, Step
    from lionwt.records import CompletionPolicy, LeaseFile, Record
    from lionwt.session import Run
    from lionwt.status import Everywhere, Standing


def of_lease(run: Run, files: Sequence[LeaseFile]) -> Answer:
    """The answer of ``lease``."""
    pinned = run.file
    leases = [file.lease for file in files]
    return Answer(
        "lease",
        payload={
            "run": {
                "run_id": pinned.run_id,
                "session_id": pinned.session_id,
                "state_root": str(run.paths.state_root),
                "artifact_root": str(run.paths.artifact_root),
                "repository": pinned.main_worktree.path,
                "checkout": pinned.checkout.path,
                "target_branch": _short(pinned.target),
                "base_sha": pinned.base_sha,
                "policy": plain(pinned.policy),
                "required_validations": list(pinned.required_validations),
                "merged_checks": [plain(check) for check in pinned.merged_checks],
            },
            "leases": [plain(lease) for lease in leases],
            "bindings": [plain(Binding.of(lease)) for lease in leases],
        },
        lines=[
            Line(
                f"run {pinned.run_id} on {_short(pinned.target)} at {pinned.base_sha[:12]}, "
                f"policy {pinned.policy.completion}"
            ),
            *(Line(f"  leased {lease.worker_id}: {lease.worktree_path}", "good") for lease in leases),
        ],
        next=[f"lionwt start {run.argument} {lease.worker_id}" for lease in leases],
    )


def of_start(run: Run, file: LeaseFile) -> Answer:
    """The answer of ``start``."""
    binding = Binding.of(file.lease)
    return Answer(
        "start",
        payload={"lease": plain(file.lease), "binding": plain(binding)},
        lines=[
            Line(f"{file.worker_id} is {file.lease.state} in {binding.cwd}", "good"),
            *(Line(f"  {name}={value}") for name, value in binding.env.items()),
        ],
        next=[run.freeze_command(file)] if file.lease.state == "running" else [],
    )


def of_freeze(run: Run, file: LeaseFile) -> Answer:
    """The answer of ``freeze``; an allocated lease that failed has ended with it."""
    candidate, record = file.candidate, file.record
    lines = [Line(f"{file.worker_id} is {file.lease.state}", "good")]
    if record is not None:
        lines = _record_lines(run, file)
    elif candidate is not None:
        count = len(candidate.files_changed)
        changed = f"{count} file{'' if count == 1 else 's'} changed" if count else "it changed nothing"
        lines.append(Line(f"  {changed}; patch {_evidence(run, candidate.patch_ref)}"))
        given = {result.name for result in candidate.validations}
        missing = [name for name in file.required_validations if name not in given]
        if candidate.worker_succeeded and missing:
            lines.append(Line(f"  note: no result for {', '.join(missing)}: this will not be landed", "warn"))
    lines += [Line(f"  note: {note.message} [{note.code}]", "warn") for note in file.diagnostics]
    error = None
    if record is not None and record.status == "teardown_failed":
        error = _record_error(run, file)
    return Answer(
        "freeze",
        exit_code=error.exit_code if error else 0,
        error=error,
        payload={
            "lease": plain(file.lease),
            "candidate": plain(candidate) if candidate else None,
            "record": plain(record) if record else None,
            "diagnostics": [plain(note) for note in file.diagnostics],
        },
        lines=lines,
        next=[f"lionwt promote {run.argument} {file.worker_id}"] if record is None else error.next if error else [],
    )


def of_completion(run: Run, asked: CompletionPolicy, done: Completion) -> Answer:
    """The answer of ``promote``: one error stands for the exit code, every lease is told of."""
    from lionwt.promote import exit_of

    exit_code = done.exit_code(asked)
    waiting = [*done.pending, *done.not_ready]
    errors = [_record_error(run, file) for file in done.files if exit_code and exit_of(file, asked) == exit_code]
    errors += [entry.error for entry in done.pending if exit_code and entry.error.exit_code == exit_code]
    errors = errors or [entry.error for entry in done.not_ready if exit_code]
    lines = [line for file in done.files for line in _record_lines(run, file)]
    for entry in waiting:
        lines.append(Line(f"{entry.worker_id}: pending, {entry.error.message} [{entry.error.code}]", "warn"))
        if entry.error.hint:
            lines.append(Line(f"  → {entry.error.hint}"))
    commands = [command for error in errors + [entry.error for entry in waiting] for command in error.next]
    return Answer(
        "promote",
        exit_code=exit_code,
        error=errors[0] if errors else None,
        payload={
            "records": [plain(record) for record in done.records],
            "pending": [{"worker_id": entry.worker_id, **entry.error.as_object()} for entry in waiting],
            "outcomes": [
                {
                    "worker_id": file.worker_id,
                    "code": file.outcome.code,
                    "message": file.outcome.message,
                    "hint": file.outcome.hint,
                }
                for file in done.files
                if file.outcome is not None and file.outcome.code
            ],
        },
        lines=lines or [Line(f"run {run.file.run_id}: nothing is frozen")],
        next=list(dict.fromkeys(commands)),
        told=True,
    )


def of_reconciliation(run: Run, done: Reconciliation, dry_run: bool) -> Answer:
    """The answer of ``reconcile``: what was found, what was done, what is left for a person."""
    lines = _step_lines(done.steps, done.pending, dry_run)
    if not dry_run:
        lines += [line for file in done.ended for line in _record_lines(run, file)]
    return _upkeep(
        run, "reconcile", done.records, done.pending, done.findings, done.steps, done.exit_code(),
        lines or _nothing_to_do(run, done),
        [_record_error(run, file) for file in done.standing],
    )  # fmt: skip


def _step_lines(steps: Sequence[Step], pending: Sequence[Pending], dry_run: bool) -> list[Line]:
    """What would be done, or what was done; what is pending was not, and its own line says why."""
    waiting = {entry.worker_id for entry in pending}
    return [
        Line(f"{step.worker_id}: {step.found}")
        if step.worker_id in waiting
        else Line(f"{step.worker_id}: {step.found}; {f'would {step.action}' if dry_run else step.done}")
        for step in steps
    ]


def _nothing_to_do(run: Run, done: Reconciliation) -> list[Line]:
    count = words.count(len(done.records) + len(done.open), "lease", "leases")
    more = "nothing that reconcile can do for what needs a person" if done.standing else "nothing to do"
    lines = [Line(f"run {run.file.run_id}: {count}, all ended; {more}", "warn" if done.standing else "good")]
    if done.open:
        left = f"nothing that can be done for {', '.join(done.open)}"
        lines = [Line(f"run {run.file.run_id}: {count}, {len(done.records)} ended; {left}", "warn")]
    for file in done.standing:
        lines += _record_lines(run, file)
    return lines


def of_reaping(done: Reaping, dry_run: bool) -> Answer:
    """The answer of ``reap``."""
    lines = _step_lines(done.steps, done.pending, dry_run)
    lines += [line for run, file in done.standing for line in _record_lines(run, file)]
    if done.trash:
        trees = words.count(len(done.trash), "removed tree", "removed trees")
        lines.append(Line(f"trash: {trees}; {'would delete' if dry_run else 'deleted'}"))
    for row in done.gone:
        lines.append(Line(f"{_gone_line(row)}; {'would drop' if dry_run else 'dropped'} its row"))
    answer = _upkeep(
        None, "reap", done.records, done.pending, done.findings, done.steps, done.exit_code(),
        lines or [Line("nothing has expired", "good")],
        [_record_error(run, file) for run, file in done.standing],
    )  # fmt: skip
    answer.payload["trash"] = done.trash
    answer.payload["gone"] = _gone_rows(done.gone)
    return answer


def _upkeep(
    run: Run | None,
    command: str,
    records: Sequence[Record],
    pending: Sequence[Pending],
    findings: Sequence[Finding],
    steps: Sequence[Step],
    exit_code: int,
    lines: list[Line],
    standing: Sequence[LionwtError],
) -> Answer:
    errors = [entry.error for entry in pending]
    errors += [LionwtError(finding.code, finding.message, hint=finding.hint) for finding in findings]
    errors += standing
    for entry in pending:
        lines.append(Line(f"{entry.worker_id}: pending, {entry.error.message} [{entry.error.code}]", "warn"))
        if entry.error.hint:
            lines.append(Line(f"  → {entry.error.hint}"))
    for finding in findings:
        lines.append(Line(f"found: {finding.message} [{finding.code}]", "warn"))
        if finding.hint:
            lines.append(Line(f"  → {finding.hint}"))
    chosen = next((error for error in errors if error.exit_code == exit_code), None) if exit_code else None
    return Answer(
        command,
        exit_code=exit_code,
        error=chosen,
        payload={
            "records": [plain(record) for record in records],
            "pending": [{"worker_id": entry.worker_id, **entry.error.as_object()} for entry in pending],
            "findings": [
                {
                    "code": finding.code,
                    "message": finding.message,
                    "worker_id": finding.worker_id,
                    "hint": finding.hint,
                }
                for finding in findings
            ],
            "steps": [{"worker_id": step.worker_id, "found": step.found, "action": step.action} for step in steps],
        },
        lines=lines,
        next=list(dict.fromkeys(command for error in errors for command in error.next)),
        told=True,
    )


def of_status(standings: Sequence[Standing]) -> Answer:
    """The answer of ``status`` for one run: one line a lease, what blocks it and what to type below."""
    return Answer(
        "status",
        told=True,
        payload={"unreadable": [], "gone": [], "reported": [], "leases": _standing_rows(standings)},
        lines=_standing_lines(standings) or [Line("no leases")],
    )


def of_status_everywhere(found: Everywhere) -> Answer:
    """The answer of ``status`` for every run; what other machines report is marked as not verified."""
    lines = _standing_lines(found.standings, {row.run_id for row in found.reported})
    now = time.time()
    for row in found.reported:
        state = row.status or row.state
        lines.append(Line(f"{row.run_id}  {row.worker_id}  {state:<16}  {_age(now - row.created_at)}", "dim"))
        lines.append(Line(f"  reported by {row.machine} {_age(now - row.written_at)} ago, not verified here", "dim"))
    for row in found.gone:
        lines.append(Line(_gone_line(row), "warn"))
    lines += [Line(f"run {run_id}: {error.message} [{error.code}]", "bad") for run_id, error in found.unreadable]
    errors = [error for _, error in found.unreadable]
    worst_code = worst([error.exit_code for error in errors]) if errors else 0
    return Answer(
        "status",
        exit_code=worst_code,
        error=next((error for error in errors if error.exit_code == worst_code), None),
        told=True,
        payload={
            "unreadable": [{"run_id": run_id, **error.as_object()} for run_id, error in found.unreadable],
            "gone": _gone_rows(found.gone),
            "reported": [_reported(row) for row in found.reported],
            "leases": _standing_rows(found.standings),
        },
        lines=lines or [Line("no leases")],
    )


def _gone_line(row: Row) -> str:
    return f"{row.run_id}  {row.worker_id}: its files are gone from {row.root}"


def _gone_rows(rows: Sequence[Row]) -> list[dict[str, str]]:
    return [
        {"run_id": row.run_id, "worker_id": row.worker_id, "state_root": row.root, "host": row.machine} for row in rows
    ]


def _reported(row: Row) -> dict[str, Any]:
    """A row as another machine wrote it."""
    return {
        "verified": False,
        "host": row.machine,
        "state_root": row.root,
        "run_id": row.run_id,
        "worker_id": row.worker_id,
        "serial": row.serial,
        "state": row.state,
        "status": row.status,
        "target_branch": row.target,
        "created_at": row.created_at,
        "retention_until": row.retention_until,
        "reported_at": row.written_at,
    }


def _standing_lines(standings: Sequence[Standing], others: Collection[str] = ()) -> list[Line]:
    lines: list[Line] = []
    width = max((len(row.worker_id) for row in standings), default=0)
    several = len({row.run_id for row in standings}.union(others)) > 1
    for row in standings:
        name = f"{row.run_id}  {row.worker_id:<{width}}" if several else f"{row.worker_id:<{width}}"
        state = row.status or row.state
        lines.append(Line(f"{name}  {state:<16}  {_age(row.age)}", _MOODS.get(row.status or "", "")))
        if row.blocked_by:
            lines.append(Line(f"  {row.blocked_by}", "warn"))
        if row.next:
            lines.append(Line(f"  → {row.next}"))
        lines += [Line(f"  {told}", "dim") for told in _what_became(row.file)]
    return lines


def _standing_rows(standings: Sequence[Standing]) -> list[dict[str, Any]]:
    return [
        {
            "run_id": row.run_id,
            "worker_id": row.worker_id,
            "state": row.state,
            "status": row.status,
            "age": row.age,
            "blocked_by": row.blocked_by,
            "next": row.next,
            "lease": plain(row.file.lease) if row.file else None,
            "record": plain(row.file.record) if row.file and row.file.record else None,
        }
        for row in standings
    ]


def _what_became(file: LeaseFile | None) -> list[str]:
    """What a person asks of a lease afterwards: why, where it landed, what is kept and until when."""
    if file is None or file.record is None:
        return []
    record, outcome = file.record, file.outcome
    found = []
    if record.promoted_commit:
        found.append(f"landed on {record.lease.target_branch} as {record.promoted_commit[:12]}")
    if record.status == "discarded" and outcome is not None and outcome.message:
        found.append(outcome.message)
    elif record.status == "discarded" and file.candidate is not None and not file.candidate.worker_succeeded:
        found.append("the worker " + ("was cancelled" if file.candidate.cancelled else "failed"))
    if (
        record.status == "discarded"
        and record.patch_ref
        and file.candidate is not None
        and file.candidate.files_changed
    ):
        found.append(f"its patch is kept in {record.lease.artifact_path.parent / record.patch_ref}")
    if record.status == "retained":
        found.append(f"{record.lease.worktree_path} is kept until {_time(record.retention_until)}")
    return found


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


_MOODS: Final = {"promoted": "good", "discarded": "", "retained": "warn"}


def _record_lines(run: Run, file: LeaseFile) -> list[Line]:
    record, outcome = file.record, file.outcome
    assert record is not None
    what = {
        "promoted": f"landed on {record.lease.target_branch} as {(record.promoted_commit or '')[:12]}",
        "discarded": "kept as a patch" if record.patch_ref else "ended before it started",
        "needs_resolution": "needs a person",
        "retained": f"needs a person; its worktree is kept until {_time(record.retention_until)}",
        "teardown_failed": f"{outcome.status if outcome else 'ended'}, but not removed whole",
    }[record.status]
    if record.status == "discarded" and not any(step.state == "running" for step in file.history):
        what = "ended before it started" + ("; what was in its worktree is kept as a patch" if record.patch_ref else "")
    if record.status == "discarded" and not record.patch_ref and any(step.state == "running" for step in file.history):
        what = "its worktree was gone, so there was nothing to capture"
    if record.status == "discarded" and outcome is not None and outcome.empty:
        what = "changed nothing"
    lines = [Line(f"{record.lease.worker_id}: {record.status}, {what}", _MOODS.get(record.status, "bad"))]
    if outcome is not None and outcome.message:
        lines.append(Line(f"  why: {outcome.message} [{outcome.code}]"))
        if outcome.hint:
            lines.append(Line(f"  → {outcome.hint}"))
    if record.patch_ref:
        lines.append(Line(f"  patch: {_evidence(run, record.patch_ref)}", "dim"))
    lines += [Line(f"  left: {error}", "warn") for error in record.teardown_errors]
    if record.status == "teardown_failed":
        lines.append(Line(f"  → {_record_error(run, file).hint}"))
    return lines


def _record_error(run: Run, file: LeaseFile) -> LionwtError:
    """Why a record is not what was asked for."""
    record, outcome = file.record, file.outcome
    assert record is not None
    if record.status == "teardown_failed":
        return LionwtError(
            "teardown_failed",
            f"worker {file.worker_id!r}: {'; '.join(record.teardown_errors) or 'something was left'}",
            hint=f"clear what is named, then: lionwt reconcile {run.argument}",
        )
    if outcome is not None and outcome.code:
        return LionwtError(outcome.code, outcome.message or outcome.code, hint=outcome.hint)
    return LionwtError(
        "worker_failed",
        f"worker {file.worker_id!r} ended as {record.status}; nothing was landed",
        hint="its patch, if any, is kept as evidence",
    )


def _short(full: str) -> str:
    return full.removeprefix("refs/heads/")


def _evidence(run: Run, ref: str) -> str:
    return str(run.paths.artifact_root / ref)


def _time(seconds: float | None) -> str:
    if not seconds:
        return "?"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"Unix second {seconds:.0f}"  # later than any calendar goes

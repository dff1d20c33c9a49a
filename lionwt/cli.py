"""The command line: arguments → one call → one answer → one exit code.

The only importer of typer. A command function does nothing but parse and call;
what it returns is an :class:`~lionwt.answers.Answer`, and :func:`run` turns
every ending, a usage error and a signal included, into one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lionwt import answers
from lionwt.answers import Answer, Line
from lionwt.errors import LionwtError

app = typer.Typer(
    name="lionwt",
    help="One git worktree per worker, proven evidence of what it did, and the truth about what became of it.",
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: lionwt lease RUN -w w1 -w w2 --target work --policy merge_validated",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
RunId = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run id or state root; default $LIONAGI_RUN_ID.")]
RunAndWorker = Annotated[
    list[str], typer.Argument(metavar="[RUN] WORKER", help="The run (default $LIONAGI_RUN_ID) and the worker.")
]


def _paths(run: str | None) -> Any:
    from lionwt import names

    return names.run_paths(run, os.environ)


def _run_and_worker(arguments: list[str]) -> tuple[str | None, str]:
    if len(arguments) == 1:
        return None, arguments[0]
    if len(arguments) == 2:
        return arguments[0], arguments[1]
    raise LionwtError("usage", "one run and one worker are needed; nothing was changed", hint="name RUN and WORKER")


@app.command("lease", epilog="Example: lionwt lease nightly -w w1 -w w2 --target work --policy merge_validated")
def lease_command(
    run: RunId = None,
    worker: Annotated[list[str] | None, typer.Option("-w", "--worker", help="A worker id; repeat for more.")] = None,
    target: Annotated[str | None, typer.Option(help="The run's own working branch (first call).")] = None,
    session: Annotated[
        str | None, typer.Option(help="Session id; default $LIONAGI_SESSION_ID, else the run id.")
    ] = None,
    repo: Annotated[
        str | None, typer.Option(help="A checkout of the repository; default the current directory.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="patch_only (default) or merge_validated.")] = None,
    retain_until: Annotated[
        str | None, typer.Option(help="Keep worktrees that need a person until then: Unix seconds or ISO 8601.")
    ] = None,
    retain_for: Annotated[str | None, typer.Option(help="The same, as a duration: 90s, 15m, 2h.")] = None,
    require: Annotated[list[str] | None, typer.Option(help="A validation every worker must pass; repeatable.")] = None,
    after: Annotated[list[str] | None, typer.Option(help="A worker to land before these; repeatable.")] = None,
    owner_pid: Annotated[
        str | None, typer.Option(help="The process that answers for the leases, or none; default the caller.")
    ] = None,
    as_json: AsJson = False,
) -> Answer:
    """Give workers a worktree each, all of them or none. The first call opens the run."""
    from lionwt import parsing
    from lionwt.lease import Request, lease
    from lionwt.records import WorkerPathBinding

    if retain_until is not None and retain_for is not None:
        raise LionwtError("usage", "--retain-until and --retain-for exclude each other; nothing was made")
    paths = _paths(run)
    request = Request(
        workers=tuple(worker or ()),
        target=target,
        session_id=session or os.environ.get("LIONAGI_SESSION_ID") or None,
        start=parsing.directory(repo) if repo is not None else None,
        completion=parsing.policy(policy),
        retain_until=parsing.moment(retain_until),
        retain_for=parsing.duration(retain_for, "--retain-for"),
        required=parsing.validation_names(require or ()),
        after=tuple(after or ()),
        owner=parsing.owner(owner_pid),
    )
    opened, files = lease(paths, request)
    leases = [file.lease for file in files]
    pinned = opened.file
    short = pinned.target.removeprefix("refs/heads/")
    lines = [Line(f"run {pinned.run_id} on {short} at {pinned.base_sha[:12]}, policy {pinned.policy.completion}")]
    lines += [Line(f"  leased {entry.worker_id}: {entry.worktree_path}", "good") for entry in leases]
    return Answer(
        "lease",
        payload={
            "run": _run_object(opened),
            "leases": [entry.model_dump(mode="json") for entry in leases],
            "bindings": [WorkerPathBinding.of(entry).model_dump(mode="json") for entry in leases],
        },
        lines=lines,
        next=[f"lionwt start {pinned.run_id} {entry.worker_id}" for entry in leases],
    )


def _run_object(run: Any) -> dict[str, Any]:
    pinned = run.file
    return {
        "run_id": pinned.run_id,
        "session_id": pinned.session_id,
        "state_root": str(run.paths.state_root),
        "artifact_root": str(run.paths.artifact_root),
        "repository": pinned.main_worktree.path,
        "checkout": pinned.checkout.path,
        "target_branch": pinned.target.removeprefix("refs/heads/"),
        "base_sha": pinned.base_sha,
        "policy": pinned.policy.model_dump(mode="json"),
        "required_validations": list(pinned.required_validations),
    }


@app.command("start", epilog="Example: lionwt start nightly w1")
def start_command(
    run_and_worker: RunAndWorker,
    grants: Annotated[
        str | None, typer.Option(help="The installed path binding as a JSON file, or - for stdin.")
    ] = None,
    as_json: AsJson = False,
) -> Answer:
    """Say that a worker has its paths and runs."""
    from lionwt import parsing, session
    from lionwt.records import WorkerPathBinding
    from lionwt.start import start

    run, worker = _run_and_worker(run_and_worker)
    opened = session.load(_paths(run))
    file = start(opened, worker, parsing.grants(grants))
    binding = WorkerPathBinding.of(file.lease)
    return Answer(
        "start",
        payload={"lease": file.lease.model_dump(mode="json"), "binding": binding.model_dump(mode="json")},
        lines=[
            Line(f"{worker} is {file.lease.state} in {binding.cwd}", "good"),
            *(Line(f"  {name}={value}") for name, value in binding.env.items()),
        ],
        next=[f"lionwt freeze {opened.file.run_id} {worker} --succeeded"],
    )


@app.command("freeze", epilog="Example: lionwt freeze nightly w1 --succeeded --validation tests=pass,exit=0")
def freeze_command(
    run_and_worker: RunAndWorker,
    succeeded: Annotated[bool, typer.Option("--succeeded", help="The worker did its job.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="The worker failed.")] = False,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="The worker was cancelled.")] = False,
    validation: Annotated[
        list[str] | None, typer.Option(help="NAME=pass|fail[,exit=N][,evidence=REF]; repeatable.")
    ] = None,
    stop_after: Annotated[
        str, typer.Option(help="Seconds the worker's processes get to stop; 0 stops nothing and answers busy.")
    ] = "10",
    accept_incomplete: Annotated[
        bool, typer.Option("--accept-incomplete", help="With --failed or --cancelled: keep raw what git cannot hold.")
    ] = False,
    as_json: AsJson = False,
) -> Answer:
    """Stop a worker and turn what it did into proven, immutable evidence."""
    from lionwt import parsing, session
    from lionwt.freeze import Verdict, freeze

    session.refuse_workers(os.environ, "freeze")
    if [succeeded, failed, cancelled].count(True) != 1:
        raise LionwtError(
            "usage",
            "exactly one of --succeeded, --failed and --cancelled is needed; nothing was changed",
            hint="say how the worker ended",
        )
    run, worker = _run_and_worker(run_and_worker)
    verdict = Verdict(
        succeeded=succeeded,
        cancelled=cancelled,
        validations=tuple(parsing.validation(entry) for entry in validation or ()),
        accept_incomplete=accept_incomplete,
        stop_after=parsing.seconds(stop_after, "--stop-after"),
    )
    opened = session.load(_paths(run))
    file = freeze(opened, worker, verdict)
    candidate = file.candidate
    lines = [Line(f"{worker} is {file.lease.state}", "good")]
    if candidate is not None:
        lines.append(
            Line(f"  {len(candidate.files_changed)} files changed; patch {_evidence(opened, candidate.patch_ref)}")
        )
    lines += [Line(f"  note: {note.message} [{note.code}]", "warn") for note in file.diagnostics]
    return Answer(
        "freeze",
        exit_code=5 if file.record is not None and file.record.status == "teardown_failed" else 0,
        payload={
            "candidate": candidate.model_dump(mode="json") if candidate else None,
            "diagnostics": [note.model_dump(mode="json") for note in file.diagnostics],
        },
        lines=lines,
        next=[f"lionwt promote {opened.file.run_id} {worker}"] if file.record is None else [],
    )


def _evidence(run: Any, ref: str) -> str:
    return str(run.paths.artifact_root / ref)


@app.command("promote", epilog="Example: lionwt promote nightly --policy merge_validated")
def promote_command(
    run: RunId = None,
    workers: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKER]...", help="Default: every frozen one.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="The run's policy, or patch_only to only keep patches.")] = None,
    lock_timeout: Annotated[str, typer.Option(help="Seconds to wait for a lock.")] = "30",
    as_json: AsJson = False,
) -> Answer:
    """Complete frozen workers in dependency order: keep their patch, or land them."""
    from lionwt import parsing, session
    from lionwt.promote import promote

    session.refuse_workers(os.environ, "promote")
    wait = parsing.seconds(lock_timeout, "--lock-timeout")
    wanted = parsing.policy(policy)
    opened = session.load(_paths(run))
    asked, done = promote(opened, tuple(workers or ()), wanted, wait)
    return _completion_answer(opened, asked, done)


def _completion_answer(run: Any, asked: Literal["patch_only", "merge_validated"], done: Any) -> Answer:
    from lionwt.promote import exit_of

    exit_code = done.exit_code(asked)
    lines: list[Line] = []
    outcomes: list[dict[str, Any]] = []
    error: LionwtError | None = None
    for file in done.files:
        outcome = file.outcome
        lines += _record_lines(run, file)
        if outcome is not None and outcome.code:
            outcomes.append(
                {"worker_id": file.worker_id, "code": outcome.code, "message": outcome.message, "hint": outcome.hint}
            )
        if error is None and exit_code and exit_of(file, asked) == exit_code:
            error = _record_error(run, file, asked)
    pending = []
    for entry in (*done.pending, *done.not_ready):
        code, message, hint = entry.error.code, entry.error.message, entry.error.hint
        pending.append({"worker_id": entry.worker_id, "code": code, "message": message, "hint": hint})
        lines.append(Line(f"{entry.worker_id}: pending, {message} [{code}]", "warn"))
        if hint:
            lines.append(Line(f"  → {hint}"))
        if error is None and exit_code and entry.error.exit_code == exit_code and entry in done.pending:
            error = entry.error
    if not lines:
        lines.append(Line(f"run {run.file.run_id}: nothing is frozen"))
    return Answer(
        "promote",
        exit_code=exit_code,
        error=error,
        payload={
            "records": [record.model_dump(mode="json") for record in done.records],
            "pending": pending,
            "outcomes": outcomes,
        },
        lines=lines,
        next=[error.hint] if error is not None and error.hint else [],
        told=True,
    )


def _record_lines(run: Any, file: Any) -> list[Line]:
    record, outcome = file.record, file.outcome
    what = {
        "promoted": f"landed on {record.lease.target_branch} as {(record.promoted_commit or '')[:12]}",
        "discarded": "kept as a patch" if record.patch_ref else "ended before it started",
        "needs_resolution": "needs a person",
        "retained": f"needs a person; its worktree is kept until {_time(record.retention_until)}",
        "teardown_failed": f"{outcome.status if outcome else 'ended'}, but not removed whole",
    }[record.status]
    if record.status == "discarded" and outcome is not None and outcome.empty:
        what = "changed nothing"
    mood = {"promoted": "good", "discarded": "", "needs_resolution": "bad", "retained": "warn"}.get(
        record.status, "bad"
    )
    lines = [Line(f"{record.lease.worker_id}: {record.status}, {what}", mood)]
    if outcome is not None and outcome.message:
        lines.append(Line(f"  why: {outcome.message} [{outcome.code}]"))
        if outcome.hint:
            lines.append(Line(f"  → {outcome.hint}"))
    if record.patch_ref:
        lines.append(Line(f"  patch: {_evidence(run, record.patch_ref)}", "dim"))
    lines += [Line(f"  left: {error}", "warn") for error in record.teardown_errors]
    return lines


def _time(seconds: float | None) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "?"


def _record_error(run: Any, file: Any, asked: str) -> LionwtError:
    record, outcome = file.record, file.outcome
    if record.status == "teardown_failed":
        return LionwtError(
            "teardown_failed",
            f"worker {file.worker_id!r}: {'; '.join(record.teardown_errors) or 'something was left'}",
            hint=f"clear what is named, then: lionwt reconcile {run.file.run_id}",
        )
    if outcome is not None and outcome.code:
        return LionwtError(outcome.code, outcome.message or outcome.code, hint=outcome.hint)
    return LionwtError(
        "worker_failed",
        f"worker {file.worker_id!r} ended as {record.status}; nothing was landed",
        hint="its patch, if any, is kept as evidence",
    )


def run(arguments: list[str]) -> int:
    """Run one command line and print its answer; returns the exit code."""
    from lionwt import signals

    signals.install()
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json = "--json" in options
    command = next((word for word in arguments if not word.startswith("-")), "lionwt")
    if command not in {entry.name for entry in app.registered_commands}:
        command = "lionwt"
    try:
        answer = _answer(arguments, command)
    except signals.Interrupted as interruption:
        return _interrupted(interruption.number)
    except KeyboardInterrupt:
        return _interrupted(2)
    if answer is None:
        return 0
    answers.show(answer, as_json)
    return answer.exit_code


def _interrupted(number: int) -> int:
    sys.stderr.write("lionwt: interrupted; what was not finished was undone or can be repeated\n")
    return 128 + number


def _answer(arguments: list[str], command: str) -> Answer | None:
    try:
        _leave_removed_directory()
        result = app(arguments, standalone_mode=False)
        return result if isinstance(result, Answer) else None
    except LionwtError as error:
        return answers.of_error(command, error)
    except typer.Exit as ending:
        return Answer(command, ending.exit_code) if ending.exit_code else None
    except _ClickError as error:
        hint = f"lionwt {command} --help" if command != "lionwt" else "lionwt --help"
        usage = LionwtError("usage", f"{error.format_message()}; nothing was changed", hint=hint)
        return answers.of_error(command, usage)
    except OSError as error:
        from lionwt.errors import from_os_error

        return answers.of_error(command, from_os_error(error, f"{command} failed"))
    except Exception as error:
        import traceback

        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        bug = LionwtError(
            "bug",
            f"{type(error).__name__}: {error} (in {Path(where.filename).name}:{where.lineno})",
            hint="please report it with the lines above; the run's files tell how far it came",
        )
        return answers.of_error(command, bug)


def _leave_removed_directory() -> None:
    """A command must not die because the directory it was called in has been removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


#: typer carries its own parser; its errors are found through a name that it exports.
_ClickError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

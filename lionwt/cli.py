"""The command line: arguments → one call → one answer → one exit code.

The only importer of typer. A command function does nothing but parse and call;
what it returns is an :class:`~lionwt.answers.Answer`, and :func:`run` turns
every ending, a usage error and a signal included, into one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lionwt import answers
from lionwt.answers import Answer
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
    from lionwt import parsing, reports
    from lionwt.lease import Request, lease

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
    return reports.of_lease(*lease(paths, request))


@app.command("start", epilog="Example: lionwt start nightly w1")
def start_command(
    run_and_worker: RunAndWorker,
    grants: Annotated[
        str | None, typer.Option(help="The installed path binding as a JSON file, or - for stdin.")
    ] = None,
    as_json: AsJson = False,
) -> Answer:
    """Say that a worker has its paths and runs."""
    from lionwt import parsing, reports, session
    from lionwt.start import start

    run, worker = _run_and_worker(run_and_worker)
    opened = session.load(_paths(run))
    return reports.of_start(opened, start(opened, worker, parsing.grants(grants)))


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
    from lionwt import parsing, reports, session
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
    return reports.of_freeze(opened, freeze(opened, worker, verdict))


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
    from lionwt import parsing, reports, session
    from lionwt.promote import promote

    session.refuse_workers(os.environ, "promote")
    wait = parsing.seconds(lock_timeout, "--lock-timeout")
    wanted = parsing.policy(policy)
    opened = session.load(_paths(run))
    return reports.of_completion(opened, *promote(opened, tuple(workers or ()), wanted, wait))


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

"""The command line: arguments → one call → one answer → one exit code.

The only importer of typer. A command function does nothing but parse and call;
what it returns is an :class:`~lionwt.answers.Answer`, and :func:`run` turns
every ending, a usage error and a signal included, into one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import typer

from lionwt import answers, signals
from lionwt.answers import Answer
from lionwt.command import running
from lionwt.errors import LionwtError, from_os_error
from lionwt.parameters import Command, Group

app = typer.Typer(
    name="lionwt",
    cls=Group,
    help="One git worktree per worker, proven evidence of what it did, and the truth about what became of it.",
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: lionwt lease RUN -w w1 -w w2 --target work --policy merge_validated",
)

verb = functools.partial(app.command, cls=Command)

Policy = Literal["patch_only", "merge_validated"]
AsJson = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
RunId = Annotated[str | None, typer.Argument(metavar="RUN", help="Run id or state root; default $LIONAGI_RUN_ID.")]
RunOrWorker = Annotated[
    str | None, typer.Argument(metavar="RUN", help="Run id or state root; may be left out for $LIONAGI_RUN_ID.")
]
Worker = Annotated[str | None, typer.Argument(metavar="WORKER", help="The worker.")]


def _paths(run: str | None) -> Any:
    from lionwt import names

    return names.run_paths(run, os.environ)


def _run_and_worker(first: str | None, second: str | None) -> tuple[str | None, str]:
    """One argument is the worker, two are the run and the worker."""
    worker = first if second is None else second
    if worker is None:
        raise LionwtError("usage", "no WORKER was given; nothing was changed", hint="name RUN and WORKER")
    return (None if second is None else first), worker


@app.command(
    "lease", cls=Command, epilog="Example: lionwt lease nightly -w w1 -w w2 --target work --policy merge_validated"
)
def lease_command(
    run: RunId = None,
    worker: Annotated[
        list[str] | None, typer.Option("-w", "--worker", metavar="W", help="A worker id; repeatable.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="The run's own working branch (first call).")
    ] = None,
    session: Annotated[
        str | None, typer.Option(metavar="ID", help="Session id; default $LIONAGI_SESSION_ID, else the run id.")
    ] = None,
    repo: Annotated[
        str | None, typer.Option(metavar="DIR", help="A checkout of the repository; default the current directory.")
    ] = None,
    policy: Annotated[Policy | None, typer.Option(help="Keep a patch (default), or land it.")] = None,
    retain_until: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Keep worktrees that need a person until then: Unix seconds or ISO 8601."),
    ] = None,
    retain_for: Annotated[
        str | None, typer.Option(metavar="TIME", help="The same, as a duration: 90s, 15m, 2h.")
    ] = None,
    require: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A validation every worker must pass; repeatable.")
    ] = None,
    check_merged: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="NAME=CMD, run on each merged tree before it lands; repeatable."),
    ] = None,
    check_timeout: Annotated[str, typer.Option(metavar="TIME", help="How long one check may take.")] = "15m",
    after: Annotated[
        list[str] | None, typer.Option(metavar="WORKER", help="A worker to land before these; repeatable.")
    ] = None,
    owner_pid: Annotated[
        str | None,
        typer.Option(metavar="PID", help="The process that answers for the leases, or none; default the caller."),
    ] = None,
    as_json: AsJson = False,
) -> Answer:
    """Give workers a worktree each, all of them or none. The first call opens the run."""
    from lionwt import parsing, reports
    from lionwt.lease import lease
    from lionwt.opening import Request

    if retain_until is not None and retain_for is not None:
        raise LionwtError("usage", "--retain-until and --retain-for exclude each other; nothing was made")
    paths = _paths(run)
    request = Request(
        workers=tuple(worker or ()),
        target=target,
        session_id=session,
        default_session=os.environ.get("LIONAGI_SESSION_ID") or None,
        start=parsing.directory(repo) if repo is not None else None,
        completion=policy,
        retain_until=parsing.moment(retain_until),
        retain_for=parsing.duration(retain_for, "--retain-for"),
        required=parsing.validation_names(require or ()),
        merged=parsing.checks(check_merged or (), check_timeout, "--check-merged"),
        after=tuple(after or ()),
        owner=parsing.owner(owner_pid),
    )
    return reports.of_lease(*lease(paths, request))


@verb("start", epilog="Example: lionwt start nightly w1")
def start_command(
    run: RunOrWorker = None,
    worker: Worker = None,
    grants: Annotated[
        str | None, typer.Option(metavar="FILE", help="The installed path binding as a JSON file, or - for stdin.")
    ] = None,
    as_json: AsJson = False,
) -> Answer:
    """Say that a worker has its paths and runs."""
    from lionwt import parsing, reports, session
    from lionwt.start import start

    of_run, worker_id = _run_and_worker(run, worker)
    opened = session.load(_paths(of_run))
    return reports.of_start(opened, start(opened, worker_id, parsing.grants(grants)))


@app.command(
    "freeze", cls=Command, epilog="Example: lionwt freeze nightly w1 --succeeded --validation tests=pass,exit=0"
)
def freeze_command(
    run: RunOrWorker = None,
    worker: Worker = None,
    succeeded: Annotated[bool, typer.Option("--succeeded", help="The worker did its job.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="The worker failed.")] = False,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="The worker was cancelled.")] = False,
    validation: Annotated[
        list[str] | None, typer.Option(metavar="RESULT", help="NAME=pass|fail[,exit=N][,evidence=REF]; repeatable.")
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="NAME=CMD, run in the worktree; a validation of that name. Repeatable."),
    ] = None,
    check_timeout: Annotated[str, typer.Option(metavar="TIME", help="How long one check may take.")] = "15m",
    stop_after: Annotated[
        str,
        typer.Option(metavar="S", help="Seconds the worker's processes get to stop; 0 stops nothing and answers busy."),
    ] = "10",
    accept_incomplete: Annotated[
        bool, typer.Option("--accept-incomplete", help="With --failed or --cancelled: keep raw what git cannot hold.")
    ] = False,
    as_json: AsJson = False,
) -> Answer:
    """Stop a worker, and turn what it did into proven evidence."""
    from lionwt import parsing, reports, session
    from lionwt.freeze import Verdict, freeze

    session.refuse_workers(os.environ, "freeze")
    if [succeeded, failed, cancelled].count(True) != 1:
        raise LionwtError(
            "usage",
            "exactly one of --succeeded, --failed and --cancelled is needed; nothing was changed",
            hint="say how the worker ended",
        )
    of_run, worker_id = _run_and_worker(run, worker)
    verdict = Verdict(
        succeeded=succeeded,
        cancelled=cancelled,
        validations=tuple(parsing.validation(entry) for entry in validation or ()),
        checks=parsing.checks(check or (), check_timeout, "--check"),
        accept_incomplete=accept_incomplete,
        stop_after=parsing.seconds(stop_after, "--stop-after"),
    )
    opened = session.load(_paths(of_run))
    return reports.of_freeze(opened, freeze(opened, worker_id, verdict))


@verb("promote", epilog="Example: lionwt promote nightly --policy merge_validated")
def promote_command(
    run: RunId = None,
    workers: Annotated[list[str] | None, typer.Argument(metavar="WORKER", help="Default: every frozen one.")] = None,
    policy: Annotated[Policy | None, typer.Option(help="The run's, or patch_only to only keep patches.")] = None,
    lock_timeout: Annotated[str, typer.Option(metavar="S", help="Seconds to wait for a lock.")] = "30",
    as_json: AsJson = False,
) -> Answer:
    """Keep the patches of frozen workers, or land them, in dependency order."""
    from lionwt import parsing, reports, session
    from lionwt.promote import promote

    session.refuse_workers(os.environ, "promote")
    wait = parsing.seconds(lock_timeout, "--lock-timeout")
    opened = session.load(_paths(run))
    return reports.of_completion(opened, *promote(opened, tuple(workers or ()), policy, wait))


@verb("reconcile", epilog="Example: lionwt reconcile nightly --dry-run")
def reconcile_command(
    run: RunId = None,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Also while the owner lives; the workers' processes are stopped.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done, and why.")] = False,
    as_json: AsJson = False,
) -> Answer:
    """After a crash: find the truth about every lease of a run, and finish."""
    from lionwt import reports, session
    from lionwt.reconcile import reconcile

    session.refuse_workers(os.environ, "reconcile")
    opened = session.load(_paths(run))
    return reports.of_reconciliation(opened, reconcile(opened, takeover=takeover, dry_run=dry_run), dry_run)


@verb("reap", epilog="Example: lionwt reap --all --dry-run")
def reap_command(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Run ids or state roots.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every run of this machine.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done, and why.")] = False,
    as_json: AsJson = False,
) -> Answer:
    """Tear down retained worktrees whose time has come, empty the trash, list orphans."""
    from lionwt import names, reports, session
    from lionwt.reap import reap
    from lionwt.runs import find

    session.refuse_workers(os.environ, "reap")
    if every and runs:
        raise LionwtError("usage", "--all and RUN exclude each other; nothing was changed", hint="give one of them")
    known = find(names.lionagi_home(os.environ)) if every else None
    chosen: Sequence[str | None] = known.roots if known else runs or [None]
    done = reap(chosen, dry_run=dry_run)
    if known:
        done.gone = known.gone
        if not dry_run:
            known.forget_gone()
    return reports.of_reaping(done, dry_run)


@verb("status", epilog="Example: lionwt status nightly")
def status_command(run: RunId = None, as_json: AsJson = False) -> Answer:
    """Show every lease of a run (or of all runs): its state, what blocks it, what to type next."""
    from lionwt import names, reports, session
    from lionwt.status import status, status_everywhere

    if run is not None or os.environ.get("LIONAGI_RUN_ID"):
        return reports.of_status(status(session.load(_paths(run))))
    return reports.of_status_everywhere(status_everywhere(names.lionagi_home(os.environ)))


@app.command(
    "li",
    cls=Command,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
    epilog="Example: lionwt li --target work --policy merge_validated o fanout claude/sonnet 'fix it' -n 4 --yolo",
)
def li_command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="What li is called with, untouched.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="The run's own working branch; default the one checked out.")
    ] = None,
    policy: Annotated[Policy | None, typer.Option(help="Keep patches (default), or land them.")] = None,
    retain_for: Annotated[
        str | None, typer.Option(metavar="TIME", help="Keep worktrees that need a person for so long: 90s, 15m, 2h.")
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="NAME=CMD, run in each worktree when its worker is done. Repeatable."),
    ] = None,
    check_merged: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="NAME=CMD, run on each merged tree before it lands; repeatable."),
    ] = None,
    check_timeout: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long one check may take; 15m if nothing is said.")
    ] = None,
    stop_after: Annotated[
        str | None, typer.Option(metavar="S", help="Seconds that what a worker left running gets to stop; 10.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A refusal of lionwt's as one JSON object on stdout.")
    ] = False,
) -> Answer:
    """Run lionagi's li with every worker in a lease. Options of lionwt's stand before ARGS, li's own in ARGS."""
    from lionwt import parsing
    from lionwt.lionagi.launch import Wishes, launch

    parsing.duration(retain_for, "--retain-for")
    bound = check_timeout or "15m"
    parsing.checks(check or (), bound, "--check")
    parsing.checks(check_merged or (), bound, "--check-merged")
    if stop_after is not None:
        parsing.seconds(stop_after, "--stop-after")
    wishes = Wishes(
        target=target,
        policy=policy,
        retain_for=retain_for,
        check=tuple(check or ()),
        check_merged=tuple(check_merged or ()),
        check_timeout=check_timeout,
        stop_after=stop_after,
        as_json=as_json,
    )
    return launch(wishes, arguments or ())


@app.callback(invoke_without_command=True)
def lionwt(
    context: typer.Context,
    version: Annotated[bool, typer.Option("-V", "--version", help="Show the version and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """What holds for every command; ``--version`` alone is answered before this module is imported."""
    if version:
        from lionwt import __version__

        print(f"lionwt {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise LionwtError("usage", "no command was given; nothing was changed", hint="see: lionwt --help")


def run(arguments: list[str]) -> int:
    """Run one command line and print its answer; returns the exit code."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    words = [word for word in arguments if not word.startswith("-")]
    command = words[0] if words and words[0] in {entry.name for entry in app.registered_commands} else "lionwt"
    try:
        with running(answers.warn):
            answer = _answer(arguments, command)
    except (signals.Interrupted, KeyboardInterrupt) as interruption:
        answer = answers.of_interruption(command, getattr(interruption, "number", signal.SIGINT))
    return answers.show(answer, as_json="--json" in options)


def _answer(arguments: list[str], command: str) -> Answer:
    try:
        return _ask(arguments, command)
    except LionwtError as error:
        # Who types the bare command wants to see what there is.
        return answers.of_error(command, error, None if arguments else _ask(["--help"], command))
    except _ClickError as error:
        text = error.format_message().replace("Value error, ", "").rstrip(".")
        untouched = " Nothing was changed" if text.endswith("?") else "; nothing was changed"
        usage = LionwtError("usage", text + untouched, hint=f"see: {_help_of(command)}")
        return answers.of_error(command, usage)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename is None and not _stands_somewhere():
            gone = "the current directory has been removed; nothing was changed"
            hint = "cd somewhere, or name every path from the root"
            return answers.of_error(command, LionwtError("usage", gone, hint=hint))
        return answers.of_error(command, from_os_error(error, f"{command} failed"))
    except Exception as error:
        return answers.of_bug(command, error)


def _ask(arguments: list[str], command: str) -> Answer:
    """Let typer parse and call. Whatever is printed on the way is help, and part of the answer."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), _only(arguments[0] if arguments else ""):
        result = app(arguments, prog_name="lionwt", standalone_mode=False)
    if isinstance(result, Answer):
        return result
    return answers.of_text(command, said.getvalue())


@contextlib.contextmanager
def _only(command: str) -> Iterator[None]:
    """Let typer build the named command alone: the others' parameters cost a tenth of its import."""
    every = app.registered_commands
    app.registered_commands = [entry for entry in every if entry.name == command] or every
    try:
        yield
    finally:
        app.registered_commands = every


def _help_of(command: str) -> str:
    return "lionwt --help" if command == "lionwt" else f"lionwt {command} --help"


def _stands_somewhere() -> bool:
    """Whether the directory in which the command was called is still there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


#: typer carries its own parser; its errors are found through a name that it exports.
_ClickError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

"""The contract of the command line: one answer for every ending, one exit code, one place to print it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

from lionwt.cli import app
from tests.conftest import LIONWT, Answer, Repo, World, wait_until

COMMANDS = sorted(str(command.name) for command in app.registered_commands)

#: What must never reach a terminal, as it would stand in UTF-8: C0, DEL, C1, bidi and separators, half characters.
UNSAFE = re.compile(
    rb"[\x00-\x09\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]|\xef\xbb\xbf"
)
WEIRD = b"a\x1b[31m\xc2\x9b\xe2\x80\xaeb\xff"


def one_object(answer: Answer, command: str) -> dict[str, Any]:
    """The JSON answer, with the keys that every one of them has."""
    found = answer.json
    assert list(found)[:5] == ["schema", "ok", "exit_code", "error", "next"], found
    assert found["schema"] == f"lionwt/{command}@1"
    assert isinstance(found["next"], list)
    if found["error"] is not None:
        assert set(found["error"]) == {"code", "message", "hint"}
        assert not found["ok"]
    return found


def in_bytes(
    world: World, *arguments: str | bytes, cwd: Path | None = None, **env: str | None
) -> subprocess.CompletedProcess[bytes]:
    """Run the command and see its output as a terminal would."""
    return subprocess.run(
        [LIONWT, *arguments],
        cwd=cwd or world.root / "repo",
        env=world.environment(dict(env)),
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )


@pytest.fixture
def in_process() -> Iterator[None]:
    """For command lines that end in the parser: pytest-console-scripts runs them in this process, at no cost."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


quickly = pytest.mark.script_launch_mode("inprocess")


# Help


@quickly
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_there_in_both_spellings_with_an_example(world: World, command: str | None) -> None:
    """Design 5: -h/--help everywhere, with an example."""
    words = [command] if command else []
    short, long = world.lionwt(*words, "-h"), world.lionwt(*words, "--help")
    assert (short.code, short.err) == (0, "")
    assert short == long
    assert short.out.startswith(f"Usage: lionwt {command or '[OPTIONS]'}")
    assert "Example: lionwt " in short.out
    assert "--json" in short.out


@quickly
@pytest.mark.usefixtures("in_process")
def test_the_example_of_every_command_is_understood_by_it(world: World, repo: Repo) -> None:
    """Design 5: an example is something one can type: the command line takes it, whatever comes of it."""
    for command in sorted({*COMMANDS} - {"li"}):  # it would become lionagi's
        text = " ".join(world.lionwt(command, "--help").out.split())
        example = shlex.split(text.partition("Example: ")[2])
        assert example[:2] == ["lionwt", command]
        assert world.lionwt(*example[1:], "--json").error != "usage", example


@quickly
@pytest.mark.usefixtures("in_process")
def test_help_as_json_is_one_object_too(world: World) -> None:
    """Design 5: --json prints exactly one object on stdout and nothing else there."""
    found = one_object(world.lionwt("promote", "--help", "--json"), "promote")
    assert found["ok"]
    assert found["text"].startswith("Usage: lionwt promote")


def test_the_bare_command_shows_its_help_and_is_a_usage_error(world: World) -> None:
    """Design 5: exit code 2 is usage; who types nothing sees what there is."""
    bare = world.lionwt()
    assert bare.code == 2
    assert bare.out == world.lionwt("--help").out
    assert one_object(world.lionwt("--json"), "lionwt")["error"]["code"] == "usage"


def test_python_m_lionwt_is_the_same_command(world: World, repo: Repo) -> None:
    """Design 5: python -m lionwt works."""
    for arguments in (["--help"], ["--version"], ["promote", "r9", "--json"]):
        module = subprocess.run(
            [sys.executable, "-m", "lionwt", *arguments],
            cwd=repo.path,
            env=world.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert Answer(module.returncode, module.stdout, module.stderr) == world.lionwt(*arguments)


def test_the_version_is_told_in_every_form(world: World) -> None:
    """Design 11: --version answers before the parser is imported; with other options the parser answers."""
    from lionwt import __version__

    for arguments in (["--version"], ["-V"]):
        assert world.lionwt(*arguments) == Answer(0, f"lionwt {__version__}\n", "")
    assert one_object(world.lionwt("--version", "--json"), "lionwt")["text"] == f"lionwt {__version__}\n"


# Usage errors

LEASE = ("lease", "r1", "-w", "w1", "--target", "work")
FREEZE = ("freeze", "r1", "w1", "--succeeded")

#: Values that an option refuses as malformed, by command and option.
BAD_VALUES: dict[tuple[str, str], tuple[str, ...]] = {
    ("lease", "--repo"): ("/nowhere/at/all",),
    ("lease", "--policy"): ("merge", ""),
    ("lease", "--retain-until"): ("tomorrow", "-5", "5", "1e400", "9" * 400, "253402300800"),
    ("lease", "--retain-for"): ("0s", "2", "2w", "-1h", "9" * 400 + "d"),
    ("lease", "--require"): ("a=b", "a,b", "", "a\nb", "a\udcffb"),
    ("lease", "--check-merged"): ("tests", "=true", "tests=", "a,b=true", "te\nsts=true"),
    ("lease", "--check-timeout"): ("soon", "0", "-1", "86401"),
    ("lease", "--owner-pid"): ("0", "-1", "nobody", "9999999999"),
    ("start", "--grants"): ("/nowhere/grants.json",),
    ("freeze", "--validation"): (
        "tests",
        "tests=maybe",
        "=pass",
        "tests=pass,exit=x",
        "tests=pass,exit=1",
        "tests=pass,colour=red",
        "tests=fail,exit=1,exit=2",
        "tests=pass,evidence=/etc/passwd",
        "tests=pass,evidence=../x",
        "tests=pass,evidence=a\x1bb",
        "te\udcffsts=pass",
    ),
    ("freeze", "--check"): ("tests", "=true", "tests= ", "a,b=true", "te\nsts=true"),
    ("freeze", "--check-timeout"): ("soon", "0", "-1", "86401"),
    ("freeze", "--stop-after"): ("soon", "-1", "9" * 400),
    ("promote", "--policy"): ("retain",),
    ("promote", "--lock-timeout"): ("soon", "-1", "86401"),
}
#: Options whose values are names, refused by a rule (exit 3) and not as usage.
NAMES = {("lease", "--worker"), ("lease", "--target"), ("lease", "--session"), ("lease", "--after")}


def value_options() -> Iterator[tuple[str, str]]:
    """Every option of every command that takes a value, from the command tree itself."""
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.is_flag and not parameter.count:
                yield name, max(parameter.opts, key=len)


def test_every_option_with_a_value_is_among_those_whose_bad_values_are_tried() -> None:
    """A new option that nobody tried with a bad value turns this red."""
    known = set(BAD_VALUES) | NAMES
    assert {option for option in value_options() if option[0] in {command for command, _ in known}} == known


@quickly
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("command", "option"), list(BAD_VALUES))
def test_a_bad_value_is_a_usage_error_that_names_it_and_changes_nothing(
    world: World, repo: Repo, command: str, option: str
) -> None:
    """Design 5: usage errors are one object too; an error says what was left untouched."""
    base = {"lease": LEASE, "start": ("start", "r1", "w1"), "freeze": FREEZE, "promote": ("promote", "r1")}[command]
    if command != "lease":
        world.lease("r1", "w1", start=command != "start")
    before = repo.snapshot(), sorted(path.name for path in world.root.rglob("*") if "runs" in path.parts)
    for value in BAD_VALUES[command, option]:
        found = one_object(world.lionwt(*base, f"{option}={value}", "--json"), command)
        assert (found["exit_code"], found["error"]["code"]) == (2, "usage"), (value, found)
        assert re.search(r"nothing was (changed|made)", found["error"]["message"]), found
    after = repo.snapshot(), sorted(path.name for path in world.root.rglob("*") if "runs" in path.parts)
    assert after == before


@quickly
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("lionwt", ["frobnicate"]),
        ("lionwt", ["--frobnicate"]),
        ("lionwt", ["Promote", "r1"]),
        ("lease", ["lease", "--frobnicate"]),
        ("lease", ["lease"]),
        ("lease", ["lease", "r1"]),
        ("lease", ["lease", "r1", "-w"]),
        ("lease", ["lease", "r1", "r2", "-w", "w1"]),
        ("lease", ["lease", "r1", "-w", "w1"]),
        ("lease", [*LEASE, "--retain-for", "2h", "--retain-until", "9999999999"]),
        ("lease", [*LEASE, "--after", "w1"]),
        ("start", ["start"]),
        ("start", ["start", "w1"]),
        ("start", ["start", "r1", "w1", "w2"]),
        ("freeze", ["freeze", "--succeeded"]),
        ("freeze", ["freeze", "r1", "w1"]),
        ("freeze", ["freeze", "r1", "w1", "--succeeded", "--failed"]),
        ("freeze", [*FREEZE, "--accept-incomplete"]),
        ("freeze", [*FREEZE, "--validation", "t=pass", "--validation", "t=pass"]),
        ("promote", ["promote"]),
        ("promote", ["promote", "r1", "--policy"]),
    ],
)
def test_a_wrong_command_line_is_one_object_with_exit_2(
    world: World, repo: Repo, command: str, arguments: list[str]
) -> None:
    """Design 5: unknown commands and options, missing and superfluous arguments, and what excludes each other."""
    answer = world.lionwt("--json", *arguments)
    found = one_object(answer, command)
    assert (found["exit_code"], found["error"]["code"], answer.err) == (2, "usage", ""), answer
    assert re.search(r"([^.?!]; n|[?] N)othing was (changed|made)$", found["error"]["message"]), found


def test_a_usage_error_tells_a_person_what_was_wrong_and_where_help_is(world: World) -> None:
    """Design 5: an error says what happened, what was left untouched, and what to type next."""
    answer = world.lionwt("lease", "--polcy", "x")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("lionwt: No such option: --polcy")
    assert "--policy" in answer.err
    assert "nothing was changed [usage]\n  → see: lionwt lease --help\n" in answer.err


@quickly
@pytest.mark.usefixtures("in_process")
def test_grants_that_are_no_object_are_a_usage_error(world: World, repo: Repo) -> None:
    """Design 5: whatever a file or stdin holds, the answer is one object."""
    world.lease("r1", "w1", start=False)
    for text in ("", "{", "[1]", "null", "[" * 100_000, '"\udcff"'):
        path = repo.write("../grants.json", text.encode("utf-8", "surrogateescape"))
        found = one_object(world.lionwt("start", "r1", "w1", "--grants", path, "--json"), "start")
        assert found["error"]["code"] == "usage", text[:20]
    assert world.lease_file("r1", "w1")["lease"]["state"] == "allocated"


# Identifiers


@quickly
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "bad", ["-x", "--json", "..", "a/b", "a b", "x" * 65, "x" * 5000, "\x1b[31m", "ä", "\udcff", ""]
)
def test_an_unsafe_worker_id_is_refused_wherever_it_stands(world: World, repo: Repo, bad: str) -> None:
    """Design 4: accepted as it stands or refused; a leading dash is never read as an option of git."""
    before = repo.snapshot()
    answer = world.lionwt("lease", "r1", "-w", bad, "--target", "work", "--json")
    assert one_object(answer, "lease")["error"]["code"] == "id_invalid"
    assert answer.code == 3
    assert not world.lionagi_home.exists()
    assert repo.snapshot() == before


@quickly
@pytest.mark.usefixtures("in_process")
def test_a_dash_dash_ends_the_options(world: World, repo: Repo) -> None:
    """Design 5: what follows -- is a name, --json included; so the refusal of that name is for people."""
    world.lease("r1", "w1", start=False)
    assert world.lionwt("start", "--json", "--", "r1", "w1").json["lease"]["state"] == "running"
    answer = world.lionwt("promote", "r1", "--", "--json")
    assert answer.code == 3
    assert answer.out == ""
    assert answer.err.startswith("lionwt: ")
    answer = world.lionwt("start", "--", "-r1", "w1")
    assert (answer.code, "[id_invalid]" in answer.err) == (3, True)


def test_the_longest_names_go_through_a_whole_life(world: World, repo: Repo) -> None:
    """Design 4: ids of 64 characters are fine everywhere; a long branch and a long file name too."""
    run, worker, branch = "r" * 64, "w" * 64, "topic/" + "b" * 180
    repo.git("switch", "-q", "-c", branch)
    tree = world.lease(run, worker, target=branch)[worker]
    tree.write("n" * 255, "long\n")
    assert world.freeze(run, worker).code == 0
    assert one_object(world.promote(run), "promote")["records"][0]["status"] == "promoted"
    assert (repo.path / ("n" * 255)).read_text() == "long\n"


@quickly
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("session", ["a\nb", "\x1b[31m", "\udcff", "s" * 256, "‮"])
def test_a_session_id_that_no_environment_or_terminal_should_carry_is_refused(
    world: World, repo: Repo, session: str
) -> None:
    """ADR-0091 D2: the three variables are exact, so what they hold must be a name; wherever it came from."""
    answers = [
        world.lionwt(*LEASE, "--json", f"--session={session}"),
        world.lionwt(*LEASE, "--json", env={"LIONAGI_SESSION_ID": session}),
    ]
    for answer in answers:
        assert (answer.code, answer.error) == (3, "id_invalid")
    assert not world.lionagi_home.exists()


# Who calls


@quickly
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("arguments", [("freeze", "r1", "w1", "--succeeded"), ("promote", "r1", "w1")])
def test_a_worker_never_completes_itself(world: World, repo: Repo, arguments: tuple[str, ...]) -> None:
    """ADR-0091 D3: workers cannot merge, discard or freeze; design 5: called_by_worker."""
    world.lease("r1", "w1")
    before = repo.snapshot(), world.lease_file("r1", "w1")
    answer = world.lionwt(*arguments, "--json", env={"LIONAGI_WORKER_ID": "other"})
    found = one_object(answer, arguments[0])
    assert (found["exit_code"], found["error"]["code"]) == (3, "called_by_worker")
    assert "'other'" in found["error"]["message"]
    assert (repo.snapshot(), world.lease_file("r1", "w1")) == before


@quickly
@pytest.mark.usefixtures("in_process")
def test_a_worker_may_lease_and_start_workers_of_its_own(world: World, repo: Repo) -> None:
    """Design 5: only freeze, promote, reconcile and reap are refused to a worker."""
    env: dict[str, str | None] = {"LIONAGI_WORKER_ID": "parent"}
    assert world.lionwt(*LEASE, "--owner-pid", "none", "--json", env=env).code == 0
    assert world.lionwt("start", "r1", "w1", "--json", env=env).code == 0


# RUN


@quickly
@pytest.mark.usefixtures("in_process")
def test_the_run_comes_from_the_environment_where_none_is_named(world: World, repo: Repo) -> None:
    """Design 3: RUN defaults to $LIONAGI_RUN_ID; a single argument of start and freeze is the worker then."""
    env: dict[str, str | None] = {"LIONAGI_RUN_ID": "r1"}
    assert world.lionwt("lease", "-w", "w1", "--target", "work", "--owner-pid", "none", env=env).code == 0
    assert world.lionwt("start", "w1", env=env).code == 0
    assert world.lionwt("freeze", "w1", "--succeeded", env=env).code == 0
    assert one_object(world.lionwt("promote", "--json", env=env), "promote")["records"][0]["lease"]["run_id"] == "r1"


@quickly
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("by", ["id", "path"])
def test_what_an_answer_names_next_leads_a_worker_to_its_end(world: World, repo: Repo, by: str) -> None:
    """Design 5: next holds what to type; a run outside LIONAGI_HOME is named by its path, quoted for a shell."""
    run = "r1" if by == "id" else str(world.root / "else where" / "r1")
    answer = world.lionwt("lease", run, "-w", "w1", "--target", "work", "--owner-pid", "none", "--json")
    typed = []
    while following := one_object(answer, answer.json["schema"][7:-2])["next"]:
        assert answer.code == 0, answer
        words = shlex.split(following[0])
        typed.append(words[1])
        answer = world.lionwt(*words[1:], "--json", cwd=world.root)
    assert typed == ["start", "freeze", "promote"]
    assert answer.json["records"][0]["status"] == "discarded"


@quickly
@pytest.mark.usefixtures("in_process")
def test_a_refusal_names_next_what_its_hint_ends_in(world: World, repo: Repo) -> None:
    """Design 5: an error says what to type next; a program finds the same command in next."""
    world.lease("r1", "w1", start=False)
    answer = world.lionwt("freeze", "r1", "w1", "--succeeded", "--json")
    found = one_object(answer, "freeze")
    assert found["error"]["hint"] == "start it first: lionwt start r1 w1"
    assert found["next"] == ["lionwt start r1 w1"]
    assert one_object(world.promote("r1"), "promote")["next"] == ["lionwt start r1 w1"]


def test_a_command_survives_that_its_directory_was_removed(world: World, repo: Repo) -> None:
    """A worker's worktree goes away under whoever stands in it; the next command must not die of it."""
    world.lease("r1", "w1")
    gone = world.root / "gone"
    gone.mkdir()
    script = f'rmdir "{gone}" && exec "$0" promote r1 w1 --json'
    done = subprocess.run(
        ["sh", "-c", script, LIONWT], cwd=gone, env=world.environment(), capture_output=True, text=True, timeout=60
    )
    assert (
        one_object(Answer(done.returncode, done.stdout, done.stderr), "promote")["pending"][0]["code"] == "not_frozen"
    )


# What people read


@quickly
@pytest.mark.usefixtures("in_process")
def test_each_answer_tells_a_person_what_happened_and_what_comes_next(world: World, repo: Repo) -> None:
    """Design 5: without --json a short human answer; results on stdout, nothing on stderr."""
    base = repo.head()
    leased = world.lionwt(*LEASE, "--policy", "merge_validated", "--owner-pid", "none")
    tree = repo.path / ".worktrees/lionagi/r1/w1"
    assert leased == Answer(
        0,
        f"run r1 on work at {base[:12]}, policy merge_validated\n  leased w1: {tree}\nnext: lionwt start r1 w1\n",
        "",
    )
    started = world.lionwt("start", "r1", "w1")
    assert started.out.splitlines()[0] == f"w1 is running in {tree}"
    assert "  LIONAGI_WORKER_ID=w1\n" in started.out
    assert started.out.endswith("next: lionwt freeze r1 w1 --succeeded\n")
    (tree / "new.txt").write_text("new\n")
    frozen = world.lionwt("freeze", "r1", "w1", "--succeeded")
    patch = world.evidence("r1", "w1") / "candidate.patch"
    assert frozen == Answer(0, f"w1 is frozen\n  1 file changed; patch {patch}\nnext: lionwt promote r1 w1\n", "")
    landed = world.lionwt("promote", "r1")
    assert landed == Answer(0, f"w1: promoted, landed on work as {repo.head()[:12]}\n  patch: {patch}\n", "")
    assert world.lionwt("promote", "r1") == landed


def test_a_conflict_tells_a_person_where_it_is_and_that_nothing_was_touched(world: World, repo: Repo) -> None:
    """Design 5: what happened, what was left untouched, what to look at."""
    trees = world.lease("r1", "w1", "w2")
    for name, tree in trees.items():
        tree.write("f1.txt", f"{name}\n")
        world.freeze("r1", name)
    answer = world.lionwt("promote", "r1")
    assert answer.code == 4
    assert answer.err == ""
    told = answer.out
    assert told.startswith("w1: promoted, landed on work as ")
    assert "w2: needs_resolution, needs a person\n  why: worker 'w2' conflicts with 'work' in f1.txt; " in told
    assert "nothing was landed and the checkout was not touched [merge_conflict]\n" in told
    patch = world.evidence("r1", "w2") / "candidate.patch"
    assert f"  → merge it by hand: git -C {repo.path} apply --3way {patch}\n" in told


@quickly
@pytest.mark.usefixtures("in_process")
def test_of_several_endings_one_exit_code_and_its_error_stand_for_all(world: World, repo: Repo) -> None:
    """Design 5: the first present of 1, 8, 7, 5, 4, 3, 6, 0; every lease is told of all the same."""
    trees = world.lease("r1", "ok", "conflict", "bad", "late")
    for name in ("ok", "conflict"):
        trees[name].write("f1.txt", f"{name}\n")
        world.freeze("r1", name)
    world.freeze("r1", "bad", "--failed")
    found = one_object(world.promote("r1", "ok", "late"), "promote")
    assert (found["exit_code"], found["error"]["code"]) == (6, "not_frozen")
    found = one_object(world.promote("r1", "ok", "late", "bad"), "promote")
    assert (found["exit_code"], found["error"]["code"]) == (3, "worker_failed")
    found = one_object(world.promote("r1", "ok", "late", "bad", "conflict"), "promote")
    assert (found["exit_code"], found["error"]["code"]) == (4, "merge_conflict")
    assert [record["lease"]["worker_id"] for record in found["records"]] == ["ok", "conflict", "bad"]
    assert [entry["worker_id"] for entry in found["pending"]] == ["late"]
    assert [(entry["worker_id"], entry["code"]) for entry in found["outcomes"]] == [
        ("conflict", "merge_conflict"),
        ("bad", "worker_failed"),
    ]


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("as_json", [True, False])
def test_a_signal_ends_a_command_with_one_answer_and_nothing_half_made(
    world: World, repo: Repo, number: signal.Signals, as_json: bool
) -> None:
    """Design 5: 128+n signal; design 7: a failed lease call is undone completely."""
    before = repo.snapshot()
    words = (*LEASE, *(("--json",) if as_json else ()))
    child = world.popen(*words, env={"LIONWT_FAULT": "lease.registered:stop"})
    try:
        wait_until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        child.send_signal(number)
        child.send_signal(signal.SIGCONT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    answer = Answer(child.returncode, out, err)
    assert answer.code == 128 + number
    if as_json:
        found = one_object(answer, "lease")
        assert found["error"]["code"] == "interrupted"
        assert number.name in found["error"]["message"]
        assert err == ""
    else:
        assert out == ""
        assert err.startswith(f"lionwt: interrupted by {number.name}; ")
    assert repo.git("for-each-ref", "refs/heads/lionagi") == ""
    assert repo.git("worktree", "list").count("\n") == 0
    assert not list(world.state("r1").rglob("w1.json"))
    after = repo.snapshot()
    after.pop(".git/info/exclude"), before.pop(".git/info/exclude")
    assert after == before


def test_a_bug_is_one_answer_too_and_its_details_go_to_stderr(world: World, repo: Repo) -> None:
    """Design 5: exit 1 is a bug in lionwt."""
    answer = world.lionwt(*LEASE, "--json", env={"LIONWT_FAULT": "lease.intended:raise"})
    found = one_object(answer, "lease")
    assert (found["exit_code"], found["error"]["code"]) == (1, "bug")
    assert "InjectedFault: lease.intended (in faults.py:" in found["error"]["message"]
    assert answer.err.startswith("Traceback (most recent call last):\n")


@pytest.mark.parametrize("fault", ["store.written", "freeze.stopped", "freeze.captured"])
def test_a_full_disk_is_named_with_exit_8(world: World, repo: Repo, fault: str) -> None:
    """Design 5: 8 git or the system failed (no space), wherever in a verb it happens."""
    world.lease("r1", "w1")
    answer = world.lionwt(*FREEZE, "--json", env={"LIONWT_FAULT": f"{fault}:nospace"})
    found = one_object(answer, "freeze")
    assert (found["exit_code"], found["error"]["code"]) == (8, "no_space")
    assert answer.err == ""
    assert world.lease_file("r1", "w1")["lease"]["state"] == "running"


# Standard streams


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("promote", "r1"), ("promote", "r1", "--json")])
def test_a_reader_that_has_gone_changes_nothing(world: World, repo: Repo, arguments: tuple[str, ...]) -> None:
    """Design 6 is about git's readers; lionwt's own may go as well: the exit code says what was done."""
    if "promote" in arguments:
        world.lease("r1", "w1")
        world.freeze("r1", "w1")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [LIONWT, *arguments],
            cwd=repo.path,
            env=world.environment(),
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("--version", "--json")])
def test_an_answer_that_cannot_be_written_is_a_failure_of_the_system(world: World, arguments: tuple[str, ...]) -> None:
    """Design 5: 8, git or the system failed (no space)."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [LIONWT, *arguments],
            cwd=world.root,
            env=world.environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert done.returncode == 8
    assert done.stderr == b"lionwt: the answer (exit code 0) could not be written: No space left on device\n"


def test_closed_standard_streams_are_no_obstacle(world: World, repo: Repo) -> None:
    """A service may call lionwt without any of the three."""
    world.lease("r1", "w1", start=False)
    script = 'exec <&- >&- 2>&-; "$0" start r1 w1 && exec "$0" freeze nowhere w1 --succeeded'
    done = subprocess.run(["sh", "-c", script, LIONWT], cwd=repo.path, env=world.environment(), timeout=60, check=False)
    assert done.returncode == 3
    assert world.lease_file("r1", "w1")["lease"]["state"] == "running"


def test_a_closed_standard_stream_never_becomes_the_descriptor_of_a_lock(world: World, repo: Repo) -> None:
    """A lock on descriptor 0, 1 or 2 would not be inherited by the children that move the target (design 3)."""
    script = f'exec <&- >&- 2>&-; exec "$0" {shlex.join(LEASE)}'
    child = subprocess.Popen(
        ["sh", "-c", script, LIONWT],
        cwd=repo.path,
        env=world.environment({"LIONWT_FAULT": "lease.registered:stop"}),
    )
    try:
        wait_until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        opened = {int(fd.name): os.readlink(fd) for fd in Path(f"/proc/{child.pid}/fd").iterdir()}
    finally:
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGCONT)
        child.wait(60)
    locked = [number for number, path in opened.items() if path.endswith(".lock")]
    assert locked
    assert min(locked) > 2
    assert [opened[number] for number in range(3)] == ["/dev/null"] * 3


@pytest.mark.parametrize("stdin", ["<&-", "</dev/null", "<<<'{]'"])
def test_grants_from_a_stdin_that_has_none_are_a_usage_error(world: World, repo: Repo, stdin: str) -> None:
    """Design 5: start --grants - reads stdin, where there is one."""
    world.lease("r1", "w1", start=False)
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" start r1 w1 --grants - --json {stdin}', LIONWT],
        cwd=repo.path,
        env=world.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = one_object(Answer(done.returncode, done.stdout, done.stderr), "start")
    assert (found["exit_code"], found["error"]["code"]) == (2, "usage")


# Terminals


def on_terminal(world: World, arguments: Sequence[str], env: dict[str, str | None]) -> bytes:
    """What a terminal of 80 columns would get to see, of stdout and stderr."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    child = subprocess.Popen(
        [LIONWT, *arguments],
        cwd=world.root,
        env=world.environment({"TERM": "xterm-256color", "NO_COLOR": None, **env}),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    seen = b""
    try:
        while chunk := os.read(controller, 65536):
            seen += chunk
    except OSError:  # EIO: the last writer has closed it
        pass
    finally:
        os.close(controller)
        child.kill()
        child.wait()
    return seen


def test_colours_are_for_terminals_and_no_color_turns_them_off(world: World, repo: Repo) -> None:
    """Design 5: colour only on a terminal; NO_COLOR honoured, and where it is empty it says nothing."""
    refusal = ["promote", "r1"]
    assert b"\x1b[1;31mlionwt: run 'r1' has not been opened" in on_terminal(world, refusal, {})
    assert b"\x1b[1;31m" in on_terminal(world, refusal, {"NO_COLOR": ""})
    assert b"\x1b" not in on_terminal(world, refusal, {"NO_COLOR": "1"})
    assert b"\x1b" not in on_terminal(world, refusal, {"TERM": "dumb"})
    assert b"\x1b" not in on_terminal(world, [*refusal, "--json"], {})
    assert b"\x1b" not in on_terminal(world, ["--help"], {})
    piped = in_bytes(world, *refusal, NO_COLOR=None, TERM="xterm-256color")
    assert b"\x1b" not in piped.stdout + piped.stderr


def test_a_long_line_reaches_a_narrow_terminal_unbroken(world: World, repo: Repo) -> None:
    """A path that is cut in two cannot be copied."""
    seen = on_terminal(world, ["promote", "r" * 60], {})
    assert (str(world.state("r" * 60)) + "/workspaces.json").encode() in seen


def test_nothing_that_came_from_a_name_steers_a_terminal(world: World) -> None:
    """Design 5, invariant 21: names, paths and git's words are escaped in every human line, JSON is ASCII."""
    where = world.root / os.fsdecode(b"checkout " + WEIRD)
    branch = "work\u009b31m\u202e"
    world.repo(where.name, branch=branch)
    told = []

    def tell(*arguments: str | bytes, code: int, in_json: bool = False) -> None:
        done = in_bytes(world, *arguments, cwd=where)
        assert done.returncode == code, done
        told.append(done.stdout + done.stderr)
        if not in_json:
            return
        as_json = in_bytes(world, *arguments, "--json", cwd=where)
        assert as_json.stdout.isascii() and not UNSAFE.search(as_json.stdout)
        assert json.loads(as_json.stdout)["schema"].startswith("lionwt/")

    tell("lease", "r1", "-w", "w1", "--target", b"no" + WEIRD, code=3)
    tell("lease", "r1", "-w", WEIRD, "--target", branch, code=3)
    tell("lease", "r1", "-w", "w1", "--target", branch, "--repo", b"no" + WEIRD, code=2)
    tell(WEIRD, code=2, in_json=True)
    tell("lease", b"--no" + WEIRD, code=2)
    trees = world.lease("r1", "w1", "w2", target=branch, start=False, cwd=where)
    for worker, tree in trees.items():
        tell("start", "r1", worker, code=0)
        for name in (WEIRD, WEIRD + b"\n2"):
            Path(os.fsdecode(bytes(tree.path) + b"/" + name)).write_text(worker)
        os.mkfifo(tree.path / os.fsdecode(b"fifo" + WEIRD))
        Path(os.fsdecode(bytes(tree.path) + b"/link" + WEIRD)).symlink_to(os.fsdecode(b"/out" + WEIRD))
    nested = Repo(trees["w1"].path / os.fsdecode(b"nested" + WEIRD), world.environment())
    nested.path.mkdir()
    nested.git("init", "-q")
    nested.commit("inner", x="x")
    tell("freeze", "r1", "w1", "--succeeded", code=4, in_json=True)
    subprocess.run(["rm", "-rf", nested.path], check=True)
    for worker in trees:
        tell("freeze", "r1", worker, "--succeeded", code=0)
    blocking = where / os.fsdecode(WEIRD)
    blocking.write_text("the operator's")
    tell("promote", "r1", "w1", code=4, in_json=True)
    blocking.unlink()
    tell("promote", "r1", code=4, in_json=True)
    everything = b"".join(told)
    assert not UNSAFE.search(everything), UNSAFE.search(everything)
    everything.decode("utf-8")
    for word in (b"\\x1b[31m", b"\\x9b", b"\\u202e", b"\\udcff", b"[checkout_blocked]", b"[merge_conflict]"):
        assert word in everything, word


def test_what_a_filter_program_says_is_escaped(world: World, repo: Repo) -> None:
    """Design 5: git's messages carry what other programs wrote on stderr."""
    with open(world.home / ".gitconfig", "a") as config:
        config.write(
            '[filter "loud"]\n\tclean = cat\n\trequired = true\n\tsmudge = "printf \'\\\\033[31mboom\' >&2; exit 1"\n'
        )
    repo.commit("attributes", **{".gitattributes": "*.txt filter=loud\n"})
    done = in_bytes(world, *LEASE)
    assert done.returncode == 8, done
    assert b"\\x1b[31mboom" in done.stderr
    assert not UNSAFE.search(done.stdout + done.stderr)


def test_a_terminal_that_knows_no_unicode_gets_ascii(world: World, repo: Repo) -> None:
    """An answer must never end as an encoding error."""
    world.lease("r1", "w1")
    done = in_bytes(world, "promote", "r1", "w1", PYTHONIOENCODING="ascii", LANG="C")
    assert done.returncode == 6
    assert done.stderr == b""
    assert b"\n  \\u2192 when it has ended: lionwt freeze r1 w1 --succeeded\n" in done.stdout

"""Installing and taking back: all or nothing, once, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from lionwt.errors import CODES, LionwtError
from lionwt.lionagi.turns import install
from tests.lionagi.branches import OPERATIONS, Fake, Heard, branch_of, call, installed, offline, run, settled

__all__ = ["offline"]

MODULES = (
    "lionagi.session.branch",
    "lionagi.session.session",
    "lionagi.session.signal",
    "lionagi.session.control",
    "lionagi.session._lifecycle_ctx",
    "lionagi.operations._observe",
    "lionagi.operations.run",
    "lionagi.operations.run.run",
    "lionagi.operations.chat.chat",
    "lionagi.operations.chat._prepare",
    "lionagi.operations.operate.operate",
    "lionagi.operations.ReAct.ReAct",
)


def everything(*classes: Any) -> dict[tuple[str, str], int]:
    """Every attribute of lionagi's classes and modules that an adapter could touch, by identity."""
    from lionagi import Branch, Session

    owners = [Branch, Session, *classes, *(importlib.import_module(name) for name in MODULES)]
    return {
        (getattr(owner, "__name__", ""), name): id(value)
        for owner in owners
        for name, value in vars(owner).items()
        if not name.startswith("__") or name in ("__init__", "__dict__", "__slots__")
    }


def changed(before: dict[tuple[str, str], int], *classes: Any) -> set[tuple[str, str]]:
    now = everything(*classes)
    return {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}


def test_it_imports_nothing_heavy_and_not_lionagi() -> None:
    """The adapter is importable where lionagi is not."""
    script = (
        "import sys; sys.modules['lionagi'] = None\n"
        "import lionwt.lionagi.turns\n"
        "assert not {'typer', 'rich', 'pydantic', 'filelock', 'msgspec', 'psutil', 'anyio'} & set(sys.modules)\n"
        "from lionwt.errors import LionwtError\n"
        "try: lionwt.lionagi.turns.install()\n"
        "except LionwtError as error: print(error.code, '|', error, '|', error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lionagi_unsupported | lionagi cannot be imported")
    assert "nothing was changed | install it with lionwt: pip install 'lionwt[lionagi]'" in done.stdout


def test_what_it_replaces_is_known_and_all_is_put_back() -> None:
    """Uninstall restores everything, attribute by attribute."""
    before = everything()
    with installed():
        replaced = changed(before)
        assert replaced == {
            *(("Branch", name) for name in OPERATIONS),
            *(("Branch", name) for name in ("control", "poll_control", "last_context_report", "drain_signals")),
            *(("Branch", name) for name in ("_observed_run", "_safe_emit", "_schedule_emit")),
            ("lionagi.operations.run.run", "run"),
            ("lionagi.operations.run.run", "_apply_context_providers"),
            ("lionagi.operations.chat.chat", "_apply_context_providers"),
        }
        from lionagi.operations import run as package

        assert inspect.ismodule(package.run)  # the package's attribute stays the module
    assert changed(before) == set()


def test_it_is_put_back_from_branches_as_well() -> None:
    """A branch made before, and one made meanwhile, hold lionagi's own callback afterwards."""
    from lionagi import Branch

    own = Branch._schedule_emit
    before = branch_of(Fake())
    with installed():
        meanwhile = branch_of(Fake())

        async def main() -> None:
            await before.chat("x")
            await meanwhile.chat("x")

        run(main)
        assert before.on_message_added[0].__func__ is Branch._schedule_emit is not own
    for branch in (before, meanwhile):
        assert branch.on_message_added[0].__func__ is own
        assert branch.on_message_added[0].__self__ is branch


def test_afterwards_lionagi_is_what_it_was() -> None:
    """Also for who holds a wrapper, and for a branch of the meantime that was never used."""
    with installed():
        from lionagi import Branch
        from lionagi.operations.run.run import run as held

        bound = Branch.communicate
        unused = branch_of(Fake())

    async def main() -> None:
        from lionagi.operations.types import RunParam

        heard = Heard(unused)
        await bound(unused, "x", chat_model=Fake(cli=False).model)
        assert heard.all_kinds.count("MessageAdded") == 2
        assert heard.kinds == ["RunStart", "RunEnd"]
        assert not hasattr(heard.lifecycle[0], "turn_id")
        stream = held(unused, "y", RunParam())
        assert inspect.isasyncgen(stream)
        assert [type(message).__name__ async for message in stream] == ["Instruction", "AssistantResponse"]
        assert heard.kinds == ["RunStart", "RunEnd"] * 2

    run(main)


def test_branches_made_before_are_included() -> None:
    """Their messages are told inside their turns."""
    branch = branch_of(Fake(cli=False))
    heard = Heard(branch)

    async def main() -> None:
        with installed():
            await branch.communicate("x")
        heard.one_pair()
        kinds = [kind for kind in heard.all_kinds if kind in ("RunStart", "MessageAdded", "RunEnd")]
        assert kinds == ["RunStart", "MessageAdded", "MessageAdded", "RunEnd"]

    run(main)


def test_a_directive_from_before_ends_no_turn() -> None:
    """ADR-0018 D3: what lionagi has kept is not for a turn that nobody knew of."""

    async def main() -> None:
        from lionagi.session.control import LoopDirective

        branch = branch_of(Fake())
        branch.control(LoopDirective.BREAK)
        with installed():
            assert branch.poll_control() is None
            assert len(await call(branch, "run")) == 2
        assert branch.poll_control().directive is LoopDirective.BREAK  # as it was

    run(main)


def test_the_function_behind_run_is_a_turn_too() -> None:
    """`operations.run.run.run` is called directly by others."""

    async def main() -> None:
        from lionagi.operations.types import RunParam

        module = importlib.import_module("lionagi.operations.run.run")
        own, other = Fake("own"), Fake("other")
        branch = branch_of(own)
        heard = Heard(branch)
        found = [m async for m in module.run(branch, "x", RunParam(imodel=other.model))]
        assert len(found) == 2
        heard.one_pair()
        assert (len(own.requests), len(other.requests)) == (0, 1)
        assert branch.chat_model is own.model
        assert await module.run_and_collect(branch, "y", RunParam()) == "ry"
        assert heard.kinds == ["RunStart", "RunEnd"] * 2

    with installed():
        run(main)


def test_installed_twice_it_is_there_once_and_stays_until_both_are_gone() -> None:
    """The same arguments: one installation, as long as anyone wants it. Taken back twice: once."""
    from lionagi import Branch

    before = everything()
    first = install()
    there = everything()
    second = install(Branch)
    assert changed(there) == set()
    first()
    first()
    assert changed(there) == set()
    second()
    assert changed(before) == set()
    second()
    third = install()
    first()
    assert changed(before) != set()
    third()
    assert changed(before) == set()


@pytest.mark.parametrize("options", [{"unattributed_control": "legacy"}, {"start": "adopt"}])
def test_other_arguments_are_refused_while_it_is_installed(options: dict[str, Any]) -> None:
    """One installation at a time, and the first stays as it is."""
    with installed():
        there = everything()
        with pytest.raises(LionwtError, match="installed with other arguments; nothing was changed") as refused:
            install(**options)
        assert refused.value.code == "already_done" and refused.value.hint
        assert changed(there) == set()
    with installed(**options):
        pass


@pytest.mark.parametrize(
    ("target", "options"),
    [
        (object, {}),
        ("Branch", {}),
        (None, {"unattributed_control": "drop"}),
        (None, {"start": "never"}),
    ],
)
def test_wrong_arguments_are_refused(target: Any, options: dict[str, Any]) -> None:
    """With nothing changed."""
    before = everything()
    with pytest.raises(LionwtError, match="nothing was changed") as refused:
        install(target, **options)
    assert refused.value.code == "usage"
    assert changed(before) == set()


def test_a_subclass_alone_can_be_the_target() -> None:
    """`target`: its branches take turns, others are lionagi's, and nothing is left on the class."""
    from lionagi import Branch

    class Mine(Branch):
        pass

    before = everything(Mine)

    async def main() -> None:
        for kind, stamped in ((Mine, True), (Branch, False)):
            branch = kind(chat_model=Fake().model)
            heard = Heard(branch)
            await branch.communicate("x")
            await call(branch, "run")
            assert heard.kinds == ["RunStart", "RunEnd"] * 2
            assert [hasattr(signal, "turn_id") for signal in heard.lifecycle] == [stamped] * 4

    with installed(target=Mine):
        run(main)
    assert changed(before, Mine) == set()


def test_what_somebody_else_replaced_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is still the adapter's is put back; who wrapped it wraps lionagi's again."""
    from lionagi import Branch

    original = Branch.chat
    uninstall = install()
    ours = Branch.chat

    async def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return [await ours(self, *args, **kwargs)]

    Branch.chat = theirs
    try:
        uninstall()
        assert Branch.chat is theirs

        async def main() -> None:
            branch = branch_of(Fake(cli=False))
            heard = Heard(branch)
            assert await branch.chat("x") == ["rx"]
            assert heard.kinds == []

        run(main)
    finally:
        Branch.chat = original


# Live turns


@pytest.mark.parametrize("name", ["communicate", "operate", "ReAct", "run"])
def test_a_turn_that_is_live_when_it_is_taken_back_ends_as_a_turn(name: str) -> None:
    """One stamped pair, its messages inside; then everything is lionagi's."""
    before = everything()

    async def main() -> None:
        fake = Fake(cli=name == "run")
        branch = branch_of(fake)
        heard = Heard(branch)
        word = 'characters."' if name == "ReAct" else "x"
        fake.gate(word)
        uninstall = install()
        task = asyncio.create_task(call(branch, name))
        await fake.entered[word].wait()
        uninstall()
        from lionagi import Branch

        assert not any(id(vars(Branch)[op]) != before[("Branch", op)] for op in OPERATIONS)
        fake.gates[word].set()
        await task
        heard.one_pair()
        kinds = [kind for kind in heard.all_kinds if kind in ("RunStart", "MessageAdded", "RunEnd")]
        assert kinds[-1] == "RunEnd" and kinds.count("MessageAdded") == len(branch.messages)
        del task
        gc.collect()
        assert changed(before) == set()
        heard.signals.clear()
        await branch.communicate("y")
        assert heard.kinds == ["RunStart", "RunEnd"] and not hasattr(heard.lifecycle[0], "turn_id")

    run(main)
    assert changed(before) == set()


def test_a_turn_that_is_left_behind_may_still_nest() -> None:
    """`operate` on a CLI model runs a stream inside its turn, also when that begins afterwards."""
    before = everything()

    async def main() -> None:
        from lionagi.session.signal import RunStart

        branch = branch_of(Fake())
        heard = Heard(branch)
        uninstall = install()
        heard.session.observe(RunStart, handler=lambda *_: uninstall())
        assert await branch.operate(instruction="x") == "rx"
        heard.one_pair()

    run(main)
    gc.collect()
    assert changed(before) == set()


def test_installed_again_while_an_old_turn_is_live_it_waits_for_that_turn() -> None:
    """What is live is known to whoever installs next, and taking back leaves nothing."""
    before = everything()

    async def main() -> None:
        fake = Fake(cli=False)
        branch = branch_of(fake)
        heard = Heard(branch)
        fake.gate("x")
        uninstall = install()
        one = asyncio.create_task(branch.communicate("x"))
        await fake.entered["x"].wait()
        uninstall()
        with installed():
            two = asyncio.create_task(branch.communicate("y"))
            await settled()
            assert len(fake.requests) == 1
            fake.gates["x"].set()
            assert await asyncio.gather(one, two) == ["rx", "ry"]
            assert heard.kinds == ["RunStart", "RunEnd"] * 2
        assert changed(before) == set()

    run(main)


def test_a_call_that_is_under_way_when_it_is_installed_stays_lionagis() -> None:
    """It is no turn: nobody waits for it, and it ends as it began."""

    async def main() -> None:
        fake = Fake(cli=False)
        branch = branch_of(fake)
        heard = Heard(branch)
        fake.gate("x")
        old = asyncio.create_task(branch.communicate("x"))
        await fake.entered["x"].wait()
        with installed():
            assert await branch.communicate("y") == "ry"
            fake.gates["x"].set()
            assert await old == "rx"
        assert heard.kinds == ["RunStart", "RunStart", "RunEnd", "RunEnd"]
        assert [hasattr(signal, "turn_id") for signal in heard.lifecycle] == [False, True, True, False]
        assert heard.all_kinds.count("MessageAdded") == 4

    run(main)


def test_a_loop_that_died_in_a_turn_does_not_hold_the_adapter() -> None:
    """The turn of a closed loop has ended."""
    before = everything()
    fake = Fake(cli=False)
    branch = branch_of(fake)
    uninstall = install()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        fake.gate("x")
        task = asyncio.ensure_future(branch.communicate("x"))
        await fake.entered["x"].wait()
        task._log_destroy_pending = False  # type: ignore[attr-defined]

    loop.run_until_complete(main())
    loop.close()
    uninstall()
    assert changed(before) == set()


# A lionagi that is not the known one


def _gone(monkeypatch: pytest.MonkeyPatch, where: str, name: str) -> None:
    monkeypatch.delattr(_owner(where), name)


def _owner(where: str) -> Any:
    from lionagi import Branch

    return Branch if where == "Branch" else importlib.import_module(where)


SEAMS = [
    *(("Branch", name) for name in OPERATIONS),
    *(("Branch", name) for name in ("emit", "control", "poll_control", "drain_signals", "last_context_report")),
    *(("Branch", name) for name in ("_observed_run", "_safe_emit", "_schedule_emit", "chat_model")),
    ("lionagi.operations.run.run", "run"),
    ("lionagi.operations.run.run", "_apply_context_providers"),
    ("lionagi.operations.chat.chat", "_apply_context_providers"),
    ("lionagi.operations._observe", "emit_message"),
    ("lionagi.session.signal", "build_run_end"),
    ("lionagi.session.signal", "RunFailed"),
    ("lionagi.session._lifecycle_ctx", "suppress_lifecycle_var"),
]


def refused(match: str) -> None:
    """Refused in one sentence, before the first change."""
    before = everything()
    with pytest.raises(LionwtError, match=match) as error:
        install()
    assert error.value.code == "lionagi_unsupported" in CODES
    assert error.value.message.endswith("; nothing was changed") and "\n" not in error.value.message
    assert error.value.hint
    assert changed(before) == set()


@pytest.mark.parametrize(("where", "name"), SEAMS)
def test_a_missing_seam_is_refused(monkeypatch: pytest.MonkeyPatch, where: str, name: str) -> None:
    """Whatever the adapter replaces or uses."""
    _gone(monkeypatch, where, name)
    refused(name)


@pytest.mark.parametrize(("where", "name"), [seam for seam in SEAMS if seam[1] not in ("RunFailed",)])
def test_a_seam_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch, where: str, name: str) -> None:
    """Another kind of thing, or other parameters."""

    async def other(self: Any, *, something: int) -> None: ...

    monkeypatch.setattr(_owner(where), name, other)
    refused(name)


def _reordered(self: Any, reason: str | None = None, directive: Any = None) -> None: ...


def _demanding(self: Any, directive: Any, *, reason: str | None = None, loud: bool) -> None: ...


@pytest.mark.parametrize("control", [_reordered, _demanding])
def test_changed_parameters_are_refused(monkeypatch: pytest.MonkeyPatch, control: Callable[..., None]) -> None:
    """The known ones in their order, and no new one that has to be given."""
    monkeypatch.setattr(_owner("Branch"), "control", control)
    refused("Branch.control of this lionagi takes other parameters")


def test_a_new_optional_parameter_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lionagi that has grown where it does not matter is a known one."""

    def control(self: Any, directive: Any, *, reason: str | None = None, loud: bool = False) -> None: ...

    monkeypatch.setattr(_owner("Branch"), "control", control)
    with installed():
        pass


@pytest.mark.parametrize("version", ["0.35.9", "0.9", "", "unknown"])
def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """0.36.0 is the oldest that is known."""
    import lionagi

    monkeypatch.setattr(lionagi, "__version__", version)
    refused("needs lionagi 0.36.0 or newer")


@pytest.mark.parametrize("version", ["0.36", "0.36.0", "0.36.1", "0.37.0rc1", "1.0.0"])
def test_a_newer_version_with_the_same_seams_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """What decides is the seams."""
    import lionagi

    monkeypatch.setattr(lionagi, "__version__", version)
    with installed():
        pass


def test_a_lionagi_that_stamps_its_turns_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """ADR-0018 done in lionagi itself needs no adapter."""
    from lionagi.session import signal

    from lionwt.lionagi import lifecycle

    monkeypatch.setattr(signal, "RunStart", lifecycle.RunStart)
    refused("stamps its turns itself")


# Memory


def test_nothing_is_kept_of_a_branch_that_is_gone() -> None:
    """What is kept beside a branch goes with it, and a turn's context with the turn."""
    from lionwt.lionagi import hosts

    async def main() -> None:
        from lionagi import Branch

        fake = Fake(cli=False)
        branch = branch_of(fake)
        fake.gate("x")
        task = asyncio.create_task(branch.communicate("x"))
        await fake.entered["x"].wait()
        kept = hosts.known(branch)
        assert kept is not None and kept.state.active is not None
        context = weakref.ref(kept.state.active)
        fake.gates["x"].set()
        await task
        del task, kept
        gc.collect()
        assert context() is None
        known = len(hosts._kept)
        unheard = Branch.model_construct()  # lionagi itself keeps the branches that it fills in
        assert hosts.kept_of(unheard) is hosts.kept_of(unheard) is not hosts.kept_of(branch)
        assert len(hosts._kept) == known + 1
        del unheard
        gc.collect()
        assert len(hosts._kept) == known

    with installed():
        run(main)

"""``worktree_per_worker`` for ``li o fanout`` and ``li o flow`` (ADR-0091 D1, D2, D3).

Who calls ``lionwt li`` gets lionagi's own command with every worker in a lease:
planned, spawned, retried and resumed ones, planning and synthesis included. The
order is the guarantee. First everything that cannot be kept is refused, before
anything runs. The orchestrator's lease opens the run, before the plan is asked
for. A worker's operation begins with its lease, its requests bound to it and
compared with it, and ends with its freeze, whatever happens in between. The run
ends with the completion of every candidate.

Nothing of lionagi is changed on disk, and nothing at all without the command.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lionwt import answers, repository
from lionwt.errors import LionwtError
from lionwt.lionagi import beforehand, providers, tools, worker_seams
from lionwt.lionagi.launch import Wishes
from lionwt.lionagi.leases import ORCHESTRATOR, Held, Leases, tell, to_its_end

#: The section of a worker's instructions that says where it works; the first line is lionagi's own.
_PLACE = """\
ARTIFACT DIRECTORY: {artifact_dir}

Your working directory is a git worktree of your own, made for this task. Change source files there, by relative \
paths: what you leave in it, committed or not, is what you hand in. Other checkouts of the repository are not yours \
to read or write. Put reports and other output that is no source into the artifact directory, by absolute paths. \
Reference upstream artifacts only by paths you were given.\
"""


@dataclass
class Orchestration:
    """One run of ``li o fanout`` or ``li o flow``; ``env`` is lionagi's, once it is set up."""

    wishes: Wishes
    planned: frozenset[str] = frozenset()  # the workers of the run that is resumed
    leases: Leases | None = None
    env: Any = None
    orchestrator: Held | None = None
    workers: dict[str, str] = field(default_factory=dict)  # operation → worker


_running: ContextVar[Orchestration | None] = ContextVar("lionwt_orchestration", default=None)
_held: ContextVar[Held | None] = ContextVar("lionwt_held", default=None)


def main() -> int:
    """Be ``li`` with the adapter installed; returns lionagi's exit code, or that of a landing that did not come."""
    wishes, arguments = Wishes.of(sys.argv[1]), sys.argv[2:]
    sys.argv = ["li", *arguments]
    try:
        adapter = Adapter(wishes)
        adapter.install()
        code = int(importlib.import_module("lionagi.cli.main").main() or 0)
    except LionwtError as error:
        return answers.show(answers.of_error("li", error), wishes.as_json)
    return code or adapter.exit_code


class Adapter:
    """What is put into lionagi's worker_seams."""

    def __init__(self, wishes: Wishes) -> None:
        self.wishes = wishes
        self.exit_code = 0

    def install(self) -> None:
        """Take hold of every seam; raises ``lionagi_unsupported`` before the first is touched."""
        worker_seams.require_supported()
        orchestrate = worker_seams.module("lionagi.cli.orchestrate")
        fanout, flow = (worker_seams.module(f"lionagi.cli.orchestrate.{name}") for name in ("fanout", "flow"))
        common = worker_seams.module("lionagi.cli.orchestrate._common")
        operation = worker_seams.module("lionagi.operations.node").Operation
        run_fanout, run_flow = self.run(fanout._run_fanout), self.run(flow._run_flow)
        fanout._run_fanout = orchestrate._run_fanout = run_fanout
        flow._run_flow = orchestrate._run_flow = run_flow
        fanout.setup_orchestration = flow.setup_orchestration = self.setup(fanout.setup_orchestration)
        common._ARTIFACT_SECTION_WITH_DIR = _PLACE
        operation._invoke = self.invoke(operation._invoke)
        for place in worker_seams.PROVIDER_MODULES:
            module = worker_seams.module(place)
            module.ndjson_from_cli = self.start(module.ndjson_from_cli)
        codex = worker_seams.module("lionagi.providers.openai.codex")
        codex._linked_worktree_git_writable_roots = self.git_roots(codex._linked_worktree_git_writable_roots)
        sys.addaudithook(beforehand.refuse_unleased)

    def run(self, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """A whole orchestration: whatever becomes of it, its leases are ended."""

        @functools.wraps(original)
        async def run_in_leases(*arguments: Any, **named: Any) -> Any:
            beforehand.refuse_shared(named)
            plan = (named.get("resume_checkpoint") or {}).get("plan") or ()
            running = Orchestration(self.wishes, planned=frozenset(entry.get("agent_id", "") for entry in plan))
            token = _running.set(running)
            try:
                result = await original(*arguments, **named)
                verdict = "--succeeded" if result[1] == "completed" else "--failed"
                return result
            except BaseException as error:
                verdict = _verdict(error)
                raise
            finally:
                _running.reset(token)
                await to_its_end(self._end(running, verdict))

        return run_in_leases

    async def _end(self, running: Orchestration, verdict: str) -> None:
        self.exit_code = await _end(running, verdict)

    def setup(self, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """The orchestration is set up: from here its run and session are known."""

        @functools.wraps(original)
        async def setup_in_lease(*arguments: Any, **named: Any) -> Any:
            env = await original(*arguments, **named)
            running = _running.get()
            if running is None:
                raise LionwtError("bug", "an orchestration was set up outside a run; nothing was leased")
            await _open(running, env)
            return env

        return setup_in_lease

    def invoke(self, original: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        """One worker's operation, from its lease to its freeze."""

        @functools.wraps(original)
        async def invoke_in_lease(operation: Any) -> Any:
            running = _running.get()
            branch = operation._branch
            if running is None or running.env is None or branch is None or branch is running.env.orc_branch:
                return await original(operation)
            return await _work(running, operation, branch, functools.partial(original, operation))

        return invoke_in_lease

    def start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The process of a provider, about to be started."""

        @functools.wraps(original)
        def start_in_lease(cmd: list[str], *, cwd: Any = None, env: Any = None, **named: Any) -> Any:
            held, running = _held.get(), _running.get()
            if held is None:
                if running is not None:
                    raise LionwtError("grants_mismatch", "a provider would be started without a lease; it was not")
                answers.warn(f"{named.get('engine')} works without a lease: only li o fanout and li o flow have them")
                return original(cmd, cwd=cwd, env=env, **named)
            try:
                providers.confined(cmd, cwd, named.get("engine"), held)
            except LionwtError as error:
                if running is not None and running.leases is not None:
                    running.leases.note(held.worker_id, error)
                raise
            return original(cmd, cwd=held.worktree, env=providers.environment(env, held), **named)

        return start_in_lease

    def git_roots(self, original: Callable[[Path], tuple[Path, ...]]) -> Callable[[Path], tuple[Path, ...]]:
        """codex would be given the repository's own refs and objects to write; a lease grants none."""

        @functools.wraps(original)
        def no_git_roots(cwd: Path) -> tuple[Path, ...]:
            return () if _held.get() is not None else original(cwd)

        return no_git_roots


async def _open(running: Orchestration, env: Any) -> None:
    """Open the run with the orchestrator's lease, in which it plans and, in a flow, synthesises."""
    home = Path(worker_seams.module("lionagi.utils").LIONAGI_HOME).absolute()
    found = repository.discover(Path(env.cwd or os.getcwd()))
    leases = Leases(
        run_id=env.run.run_id,
        session_id=str(env.session.id),
        home=home,
        checkouts=(found.checkout, found.main_worktree),
        wishes=running.wishes
        if running.wishes.target
        else replace(running.wishes, target=beforehand.checked_out(found)),
    )
    running.leases, running.env = leases, env
    # Taken as lionagi takes its workers' names: a worker of that role gets another, and its artifacts with it.
    name = env.assign_name(ORCHESTRATOR)
    while name in running.planned:
        name = env.assign_name(ORCHESTRATOR)
    held = await leases.lease(leases.name(name))
    running.orchestrator = held
    answers.warn(f"run {env.run.run_id}: every worker gets a lease; should li die: lionwt reconcile {env.run.run_id}")
    await _start(leases, held, env.orc_branch)
    _held.set(held)


async def _end(running: Orchestration, verdict: str) -> int:
    """End every lease of a run that is over; returns promote's exit code."""
    leases = running.leases
    if leases is None:
        return 0
    try:
        if running.orchestrator is not None and running.orchestrator.worker_id in leases.open:
            await leases.freeze(running.orchestrator, verdict)
    except LionwtError as error:
        tell(error)
    try:
        return await leases.finish()
    except LionwtError as error:
        tell(error)
        return error.exit_code


async def _work(running: Orchestration, operation: Any, branch: Any, invoke: Callable[[], Awaitable[Any]]) -> Any:
    """Lease, bind, start, let it work, freeze."""
    leases = running.leases
    assert leases is not None
    worker_id = leases.name(_worker_of(running, operation, branch))
    held = await leases.lease(worker_id, _predecessors(running, operation))
    running.workers[str(operation.id)] = worker_id
    token = _held.set(held)
    try:
        await _start(leases, held, branch)
        result = await invoke()
        verdict = "--succeeded"
        return result
    except BaseException as error:
        verdict = _verdict(error)
        leases.note(worker_id, error)
        raise
    finally:
        _held.reset(token)
        try:
            await leases.freeze(held, verdict)
        except LionwtError as error:
            leases.note(worker_id, error)
            # Work that could not be captured is no success; a failure or a cancellation stays what it is.
            if verdict == "--succeeded":
                raise


def _verdict(error: BaseException) -> str:
    """What whoever raised ``error`` ends as."""
    return "--failed" if isinstance(error, Exception) else "--cancelled"


async def _start(leases: Leases, held: Held, branch: Any) -> None:
    """Give a branch its lease's paths and no others, and say so."""
    registry = worker_seams.module("lionagi.service.connections.registry").EndpointRegistry
    models = [model for model in {id(m): m for m in (branch.chat_model, branch.parse_model)}.values() if model.is_cli]
    for model in models:
        providers.bind(model, held, registry.canonical_provider(model.endpoint.config.provider))
    tools.bind(branch, held)
    system = branch.msgs.system
    if system is not None and _PLACE.splitlines()[0].partition("{")[0] in str(system.content.system_message):
        # A retry inherits the place of what it retries, and would write there.
        retarget = worker_seams.module("lionagi.cli.orchestrate.flow")._retarget_spawn_prompt
        retarget(branch, held.artifacts, workspace_assigned=bool(models))
    await leases.start(held, providers.granted(models, held))


def _worker_of(running: Orchestration, operation: Any, branch: Any) -> str:
    """The name that lionagi gave the worker; a retry is named after what it retries."""
    known = operation.metadata
    retried = running.workers.get(str(known.get("escalated_from")))
    if retried is not None:
        return f"{retried}-retry"
    return str(known.get("spawn_id") or known.get("reference_id") or branch.name or operation.id)


def _predecessors(running: Orchestration, operation: Any) -> list[str]:
    """The workers of this run whose operations this one comes after."""
    mapping = running.env.builder.get_graph().node_edge_mapping
    slots = mapping.get(operation.id) or {}
    heads = [str(head) for head in (slots.get("in") or {}).values()]
    return [running.workers[head] for head in dict.fromkeys(heads) if head in running.workers]

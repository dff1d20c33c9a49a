"""A worker that is a model behind an API: its tools are bound to the lease, or it is not started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lionwt.errors import LionwtError
from lionwt.lionagi import tools
from lionwt.lionagi.leases import Held
from tests.conftest import Repo, World

#: lionagi's search leaves the pipes of the grep that it ran to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


class Worker:
    """A branch of lionagi's with its coding tools, in a lease beside another one."""

    def __init__(self, world: World, repo: Repo) -> None:
        from lionagi import Branch, iModel

        leased = world.lease("r1", "w1", "w2")
        leased["w2"].write("secret.txt", "a sibling's\n")
        repo.write("secret.txt", "the operator's\n")
        self.repo, self.root, self.sibling = repo.path, leased["w1"].path, leased["w2"].path
        self.artifacts = world.state("r1") / "artifacts" / "w1"
        self.artifacts.mkdir(parents=True, exist_ok=True)
        checkouts = (repo.path, repo.path)
        self.held = Held("w1", self.root, self.artifacts, {"LIONAGI_WORKER_ID": "w1"}, checkouts)
        self.branch = Branch(chat_model=iModel(provider="openai", model="gpt-4.1-mini", api_key="none"))

    def with_tools(self, *names: str) -> Worker:
        """lionagi's own coding tools, made for the shared checkout, as a profile would have them."""
        from lionagi.tools.coding import CodingToolkit

        self.branch.register_tools(CodingToolkit(workspace_root=self.repo, tools=names).bind(self.branch))
        return self

    def with_separate_tools(self) -> Worker:
        from lionagi.tools.code.search import SearchTool
        from lionagi.tools.file.editor import EditorTool
        from lionagi.tools.file.reader import ReaderTool

        for kind in (ReaderTool, EditorTool, SearchTool):
            self.branch.register_tools(kind(workspace_root=self.repo))
        return self

    def act(self, function: str, **arguments: Any) -> str:
        """What a call of a tool came to, as the model is told."""
        from lionagi.protocols.action.function_calling import FunctionCalling

        async def call() -> Any:
            calling = FunctionCalling(func_tool=self.branch.acts.registry[function], arguments=arguments)
            await calling.invoke()
            return calling

        calling = asyncio.run(call())
        return f"{calling.execution.error} {calling.execution.response}"


@pytest.fixture
def worker(world: World, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> Worker:
    import tiktoken

    # lionagi counts tokens with a vocabulary that would be downloaded.
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: SimpleNamespace(encode=str.split, decode=str))
    return Worker(world, repo)


def outside(worker: Worker) -> dict[str, str]:
    """Every way out, each as a path that leads to a file that is there."""
    (worker.root / "link.txt").symlink_to(worker.repo / "secret.txt")
    (worker.root / "linked").symlink_to(worker.repo)
    (worker.root / "inner").mkdir()
    (worker.root / "inner/deeper").symlink_to(worker.sibling)
    return {
        "dots": "../w2/secret.txt",
        "dots_inside": "sub/../../w2/secret.txt",
        "absolute": str(worker.repo / "secret.txt"),
        "own_absolute": str(worker.root / "f1.txt"),
        "symlink_file": "link.txt",
        "symlink_directory": "linked/secret.txt",
        "symlink_deeper": "inner/deeper/secret.txt",
        "git_file": ".git",
        "git_directory": "sub/.git/config",
        "sibling": str(worker.sibling / "secret.txt"),
        "sibling_by_name": ".worktrees/lionagi/r1/w2/secret.txt",
        "home": "~/.gitconfig",
    }


WAYS = (
    *("dots", "dots_inside", "absolute", "own_absolute", "symlink_file", "symlink_directory", "symlink_deeper"),
    *("git_file", "git_directory", "sibling", "sibling_by_name", "home"),
)
SETS: dict[str, tuple[Callable[[Worker], Worker], str]] = {
    "toolkit": (lambda worker: worker.with_tools("reader", "editor", "search"), ""),
    "separate": (Worker.with_separate_tools, "_tool"),
}


@pytest.mark.parametrize("kind", SETS)
def test_no_way_leads_out_of_the_lease(worker: Worker, kind: str) -> None:
    """ADR-0091 D2: every code-capable tool resolves under the worktree or the artifact root, and rejects escapes."""
    equip, suffix = SETS[kind]
    equip(worker)
    ways = outside(worker)
    assert tuple(ways) == WAYS
    tools.bind(worker.branch, worker.held)
    operators, siblings = (worker.repo / "secret.txt").read_text(), (worker.sibling / "secret.txt").read_text()
    for way, path in ways.items():
        read = worker.act(f"reader{suffix}", action="read", path=path)
        edited = worker.act(f"editor{suffix}", action="write", file_path=path, content="overwritten\n")
        found = worker.act(f"search{suffix}", action="grep", pattern="'s", path=path)
        for said in (read, edited, found):
            assert "operator's" not in said, way
            assert "sibling's" not in said, way
        if way not in ("sibling_by_name", "home"):  # these name something inside that is not there
            assert all("is refused" in said for said in (read, edited, found)), (way, read, edited, found)
    assert (worker.repo / "secret.txt").read_text() == operators
    assert (worker.sibling / "secret.txt").read_text() == siblings
    assert (worker.root / "link.txt").is_symlink()
    assert (worker.root / ".git").read_text().startswith("gitdir: ")
    assert "overwritten" not in (worker.root / "f1.txt").read_text()


@pytest.mark.parametrize("kind", SETS)
def test_inside_the_lease_the_tools_work(worker: Worker, kind: str) -> None:
    """ADR-0091 D2: relative paths are the worktree's, though the tools were made for the shared checkout."""
    equip, suffix = SETS[kind]
    equip(worker)
    tools.bind(worker.branch, worker.held)
    (worker.root / "f1.txt").write_text("mine needle\n")
    assert "mine needle" in worker.act(f"reader{suffix}", action="read", path="f1.txt")
    assert "mine needle" in worker.act(f"search{suffix}", action="grep", pattern="needle")
    worker.act(f"editor{suffix}", action="write", file_path="sub/new.txt", content="new\n")
    assert (worker.root / "sub/new.txt").read_text() == "new\n"
    assert not (worker.repo / "sub/new.txt").exists()


def test_a_search_without_a_path_stays_in_the_lease(worker: Worker) -> None:
    """lionagi's search knows no bounds of its own."""
    worker.with_tools("search")
    tools.bind(worker.branch, worker.held)
    assert "secret.txt" not in worker.act("search", action="grep", pattern="'s")


@pytest.mark.parametrize("name", ["bash", "code_check", "code_nav", "ast_search"])
def test_a_worker_with_a_tool_that_no_lease_confines_is_not_started(worker: Worker, name: str) -> None:
    """ADR-0091 D2: what reaches processes, or files in a way of its own, is refused by name."""
    worker.with_tools("reader", name)
    with pytest.raises(LionwtError, match=name) as refused:
        tools.bind(worker.branch, worker.held)
    assert refused.value.code == "grants_mismatch"


def test_a_tool_of_the_users_own_is_not_trusted_for_its_name(worker: Worker) -> None:
    """A function that calls itself reader may read what it likes."""

    def reader(path):  # type: ignore[no-untyped-def]
        """Read."""
        return Path(path).read_text()

    worker.branch.register_tools(reader)
    with pytest.raises(LionwtError, match="reader"):
        tools.bind(worker.branch, worker.held)


def test_a_clone_is_bound_to_its_own_lease_and_the_parent_stays_bound_to_its(worker: Worker) -> None:
    """ADR-0091 D2: cloning a branch does not clone its parent's workspace binding."""
    worker.with_tools("reader")
    tools.bind(worker.branch, worker.held)
    parent, clone = worker.branch, worker.branch.clone()
    (worker.root / "f1.txt").write_text("the parent's\n")
    other = Held("w2", worker.sibling, worker.artifacts.parent / "w2", {}, worker.held.checkouts)
    tools.bind(clone, other)
    worker.branch = clone
    assert "line 0 of 1" in worker.act("reader", action="read", path="f1.txt")
    worker.branch = parent
    assert "the parent's" in worker.act("reader", action="read", path="f1.txt")

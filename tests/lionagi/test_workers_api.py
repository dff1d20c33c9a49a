"""A model behind an API, through a whole ``lionwt li o fanout``: a local server stands for the provider.

lionagi 0.36 gives such a worker no tools of its own accord. Here it does, in a
copy that differs in two lines, so that what a worker with tools can reach is
seen from outside: what the model asked for, and what it was told.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LIONWT, Repo, World, assert_nothing_left, wait_until
from tests.lionagi.conftest import Lionagi

FANOUT = ("o", "fanout", "claude/sonnet", "all of it", "-n", "2", "--yolo", "--workers", "deepseek/small,claude/sonnet")


class Model:
    """Speaks the chat completions of OpenAI; ``says`` makes its answer of what it is asked."""

    def __init__(self) -> None:
        self.says: Callable[[str], dict[str, Any]] = lambda asked: {}
        self.asked: list[str] = []
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = self.rfile.read(int(self.headers["content-length"])).decode()
                model.asked.append(asked)
                message = {"role": "assistant", "content": json.dumps(model.says(asked))}
                answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "small"}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                body = json.dumps({**answer, "choices": [choice], "usage": usage}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Nothing is logged."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def model() -> Iterator[Model]:
    found = Model()
    yield found
    found.close()


def with_tools(lionagi: Lionagi, model: Model, *names: str) -> dict[str, str | None]:
    """A lionagi whose deepseek is the local server, and which gives these tools to a planned implementer."""
    address = f"http://127.0.0.1:{model.server.server_port}/v1"
    given = f"tools=tuple(tools) or {names!r} * (str(role) == 'implementer'),"
    changes = [
        ("providers/deepseek/_config.py", "https://api.deepseek.com/v1", address),
        (
            "service/connections/endpoint_config.py",
            "allow_local_network: bool = False",
            "allow_local_network: bool = True",
        ),
        ("agent/spec.py", "tools=tuple(tools),", given),
        ("cli/orchestrate/_common.py", '**({"actions": True} if messenger_bound else {}),', "actions=True,"),
    ]
    environment = lionagi.edited(*changes[: 4 if names else 2])
    site = Path(str(environment["PYTHONPATH"]))
    # lionagi counts tokens with a vocabulary that would be downloaded.
    (site / "tiktoken.py").write_text(
        "class Encoding:\n    def encode(self, text, **_):\n        return text.split()\n\n\n"
        "def get_encoding(name):\n    return Encoding()\n\n\nencoding_for_model = get_encoding\n"
    )
    return {**environment, "DEEPSEEK_API_KEY": "none"}


def calls(path: str) -> list[dict[str, Any]]:
    """Each of the tools, asked for one path."""
    return [
        {"function": "reader_tool", "arguments": {"action": "read", "path": path}},
        {"function": "editor_tool", "arguments": {"action": "write", "file_path": path, "content": "overwritten\n"}},
        {"function": "search_tool", "arguments": {"action": "grep", "pattern": "secret", "path": path}},
    ]


def test_no_way_leads_a_model_with_tools_out_of_its_lease(
    world: World, repo: Repo, lionagi: Lionagi, model: Model
) -> None:
    """ADR-0091 D2: each way out is refused, also to the checkout that the prompt names; inside, the tools work."""
    (world.root / "outside").mkdir()
    (world.root / "outside/secret.txt").write_text("a secret of the user\n")
    repo.write("secret.txt", "a secret of the operator\n")
    (repo.path / "link.txt").symlink_to(repo.path / "secret.txt")
    (repo.path / "linked").symlink_to(world.root / "outside")
    repo.git("add", "link.txt", "linked")
    repo.git("commit", "-qm", "links")
    environment = with_tools(lionagi, model, "reader", "editor", "search")
    lionagi.plan("job-1", "job-2", roles=("implementer", "researcher"))
    lionagi.jobs({"job-2": [["write", "secret.txt", "a secret of the sibling\n"], ["wait", "job-2"]]})
    worktrees = repo.path / ".worktrees/lionagi"

    def says(asked: str) -> dict[str, Any]:
        wait_until(lambda: (lionagi.root / "job-2.reached").exists(), 60)
        [run] = os.listdir(worktrees)
        [named] = set(re.findall(r"[^ \"]*/secret\.txt", json.loads(asked)["messages"][-1]["content"]))
        assert named == str(repo.path / "secret.txt")
        ways = [
            *("../researcher/secret.txt", "sub/../../researcher/secret.txt", "../../../../secret.txt"),
            *(str(worktrees / run / "researcher/secret.txt"), str(worktrees / run / "implementer/f1.txt")),
            *(str(world.root / "outside/secret.txt"), "link.txt", "linked/secret.txt", ".git", "sub/.git/config"),
            *(named, str(world.state(run) / "artifacts/researcher/x"), "~/.gitconfig/.."),
        ]
        inside = {"action": "write", "file_path": "mine.txt", "content": "mine\n"}
        return {
            "action_requests": [
                *(call for way in ways for call in calls(way)),
                {"function": "editor_tool", "arguments": inside},
                {"function": "reader_tool", "arguments": {"action": "read", "path": "f1.txt"}},
            ]
        }

    model.says = says
    words = [word if word != "all of it" else f"look into {repo.path}/secret.txt" for word in FANOUT]
    child = lionagi.popen("li", *words, program=LIONWT, env=environment)
    wait_until(lambda: bool(lionagi.runs()) or child.poll() is not None, 60)
    report = world.state(lionagi.run()) / "artifacts/worker_1.md"
    try:
        wait_until(lambda: report.exists() or child.poll() is not None, 60)
    finally:
        (lionagi.root / "job-2.go").touch()
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, (out, err)
    run, said = lionagi.run(), report.read_text()
    assert "a secret" not in said
    assert said.count("output=None") == 13 * 3, said  # that is all lionagi tells a model of a call that failed
    assert "line 19 of 1" in said
    assert (world.root / "outside/secret.txt").read_text() == "a secret of the user\n"
    assert (repo.path / "secret.txt").read_text() == "a secret of the operator\n"
    assert (world.applied(run, "researcher").path / "secret.txt").read_text() == "a secret of the sibling\n"
    handed_in = world.applied(run, "implementer")
    assert handed_in.git("diff", "--cached", "--name-only", "HEAD").split() == ["mine.txt"]
    assert not (repo.path / "mine.txt").exists()
    assert_nothing_left(world, repo, run)


@pytest.mark.parametrize("tool", ["bash", "coding"])
def test_a_model_with_a_tool_that_no_lease_confines_is_never_asked(
    world: World, repo: Repo, lionagi: Lionagi, model: Model, tool: str
) -> None:
    """ADR-0091 D2: refused before it starts; why is told, its lease has a record, and the others do their work."""
    environment = with_tools(lionagi, model, "reader", tool)
    lionagi.plan("job-1", "job-2", roles=("implementer", "researcher"))
    lionagi.jobs({"job-2": [["write", "new.txt", "2\n"]]})
    answer = lionagi.li("li", "--policy", "merge_validated", *FANOUT, program=LIONWT, env=environment)
    assert answer.code == 1, answer
    run = lionagi.run()
    assert model.asked == []
    [told] = [line for line in answer.err.splitlines() if line.startswith("lionwt: implementer: ")]
    assert "'implementer' has tools that no lease confines (" in told
    assert "bash" in told
    assert told.endswith("; it was not started [grants_mismatch]; remove them from the agent's profile"), told
    assert world.lease_file(run, "implementer")["candidate"]["worker_succeeded"] is False
    assert world.record(run, "researcher")["status"] == "promoted", answer.err
    assert_nothing_left(world, repo, run)


def test_a_model_as_lionagi_gives_it_works_in_a_lease(world: World, repo: Repo, lionagi: Lionagi, model: Model) -> None:
    """ADR-0091 D2: without tools it only speaks; its lease ends with a record all the same."""
    environment = with_tools(lionagi, model)
    lionagi.plan("job-1", "job-2", roles=("implementer", "researcher"))
    answer = lionagi.li("li", *FANOUT, program=LIONWT, env=environment)
    assert answer.code == 0, answer
    assert len(model.asked) == 1
    run = lionagi.run()
    assert str(world.state(run) / "artifacts/implementer") in model.asked[0]
    assert "lionwt: implementer: discarded, it changed nothing\n" in answer.err
    assert_nothing_left(world, repo, run)

"""Stands for claude, codex, agy and pi: speaks their stream formats, does what a test says, records its calls.

Installed under those names by :class:`tests.lionagi.conftest.Lionagi`. What to
do is in ``$FAKE_DIR/jobs.json``: a word that occurs in the prompt, and steps.
"""

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(os.environ["FAKE_DIR"])
NAME = os.path.basename(sys.argv[0])


def prompt() -> str:
    words = sys.argv[1:]
    if NAME == "codex":
        return sys.stdin.read()
    if NAME == "pi":
        return words[-1]
    return words[words.index("-p") + 1]


def source() -> Path:
    """Where a coding agent edits: the checkout that it was given, or where it stands."""
    words = sys.argv[1:]
    given = [Path(word) for word in words[words.index("--add-dir") + 1 :]] if "--add-dir" in words else []
    return next((path for path in given if path.is_absolute() and (path / ".git").exists()), Path.cwd())


def record(asked: str, job: str) -> None:
    seen = {
        "name": NAME,
        "job": job,
        "arguments": sys.argv[1:],
        "prompt": asked,
        "cwd": os.getcwd(),
        "pid": os.getpid(),
        "env": dict(os.environ),
    }
    path = ROOT / "calls" / f"{time.monotonic_ns()}-{os.getpid()}"
    path.with_suffix(".tmp").write_text(json.dumps(seen))
    path.with_suffix(".tmp").rename(path.with_suffix(".json"))


def wait(reached: "Callable[[], bool]") -> None:  # noqa: F821
    deadline = time.monotonic() + 60
    while not reached():
        if time.monotonic() > deadline:
            raise SystemExit("waited in vain")
        time.sleep(0.01)


def work(steps: list) -> str:
    """Do what the test says; returns the answer."""
    said = "done"
    for verb, *rest in steps:
        if verb == "write":
            path = source() / rest[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(rest[1])
        elif verb == "meet":  # together: nobody goes on before all of them are here
            place, number = ROOT / f"meet-{rest[0]}", rest[1]
            place.mkdir(exist_ok=True)
            (place / str(os.getpid())).touch()
            wait(lambda place=place, number=number: len(list(place.iterdir())) >= number)
        elif verb == "edit":  # read, meet the others, write: what an editor does to a file
            path, line, name, number = rest
            before = (source() / path).read_text()
            work([["meet", name, number]])
            (source() / path).write_text(before + line)
        elif verb == "wait":
            (ROOT / f"{rest[0]}.reached").touch()
            wait(lambda name=rest[0]: (ROOT / f"{name}.go").exists())
        elif verb == "run":
            subprocess.run(rest[0], shell=True, check=True, capture_output=True)
        elif verb == "leave":  # something of its own that goes on, as a server would
            closed = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            left = subprocess.Popen(["sh", "-c", rest[0]], start_new_session=True, **closed)
            (ROOT / f"left-{left.pid}").write_text(str(left.pid))
            wait(lambda: Path("clock.txt").exists())
        elif verb == "say":
            said = rest[0]
        elif verb == "fail":
            answer(str(rest[1:] or "failed"), failed=True)
            raise SystemExit(rest[0])
        elif verb == "rubbish":
            sys.stdout.write(rest[0])
            sys.stdout.flush()
            os._exit(0)
        elif verb == "die":
            os.kill(os.getpid(), rest[0])
    return said


def say(thing: dict) -> None:
    print(json.dumps(thing), flush=True)


def answer(text: str, failed: bool = False) -> None:
    usage = {"input_tokens": 1, "output_tokens": 1, "cached_input_tokens": 0}
    session = str(uuid.uuid4())
    if NAME == "claude":
        say({"type": "system", "subtype": "init", "session_id": session, "model": "m", "tools": []})
        content = [{"type": "text", "text": text}]
        say({"type": "assistant", "message": {"id": "m1", "role": "assistant", "content": content}})
        result = {"type": "result", "subtype": "success", "is_error": failed, "result": text, "session_id": session}
        say({**result, "usage": usage, "total_cost_usd": 0, "num_turns": 1, "duration_ms": 1})
    elif NAME == "codex":
        say({"type": "thread.started", "thread_id": session})
        say({"type": "item.completed", "item": {"type": "agent_message", "text": text}})
        say({"type": "turn.completed", "usage": usage})
    elif NAME == "agy":
        done = {"status": "ERROR" if failed else "SUCCESS", "response": text, "conversation_id": session}
        say({**done, "usage": usage, "num_turns": 1, "duration_seconds": 1})
    else:
        say({"type": "agent_start"})
        say({"type": "turn_start"})
        say({"type": "message_update", "assistantMessageEvent": {"type": "text_delta", "delta": text}})
        say({"type": "message_update", "assistantMessageEvent": {"type": "text_end", "content": text}})
        content = [{"type": "text", "text": text}]
        say({"type": "message_end", "message": {"role": "assistant", "model": "m", "content": content}})
        say({"type": "turn_end"})
        say({"type": "agent_end"})


def main() -> None:
    asked = prompt()
    jobs = json.loads((ROOT / "jobs.json").read_text())
    # A clone's prompt holds its parent's history: what was asked last counts, without its context.
    last = asked.rpartition("Instruction:")[2].partition("\nContext:")[0]
    named = [(last.rfind(word) + len(word), len(word), word) for word in jobs if word in last]
    found = max(named)[2] if named else ""
    if "TaskAssignment" in last:
        record(asked, "plan")
        work(jobs.get("plan", []))
        answer("```json\n" + (ROOT / "plan.json").read_text() + "\n```")
        return
    record(asked, found)
    answer(work(jobs.get(found, [])))


if __name__ == "__main__":
    main()

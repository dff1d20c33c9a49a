"""What is refused before anything of an orchestration runs, because no lease can hold it (ADR-0091 D1).

None of it falls back to the shared checkout in silence: what shares a directory
among the workers, or would start them where the adapter is not. The branch that
a run works on where none was named is found here too, or refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lionwt import git, names, repository
from lionwt.errors import LionwtError


def refuse_shared(named: Mapping[str, Any]) -> None:
    """Refuse team mode, and artifacts in the checkout; ``named`` is what lionagi runs the orchestration with."""
    if named.get("team_name") or named.get("team_attach"):
        raise LionwtError(
            "usage",
            "team mode shares a directory among the workers, which no lease grants; nothing was run",
            hint="leave --team-mode and --team-attach out, or run li without lionwt",
        )
    _refuse_shared_artifacts(named.get("save_dir"), named.get("cwd"))


def _refuse_shared_artifacts(save: str | None, cwd: str | None) -> None:
    """Artifacts in the checkout would be written there by every worker, and be its untracked files."""
    if save is None:
        return
    place = Path(save).expanduser().resolve()
    found = repository.discover(Path(cwd or os.getcwd()).expanduser())
    for checkout in (found.checkout, found.main_worktree):
        if place.is_relative_to(checkout):
            raise LionwtError(
                "path_unsafe",
                f"the artifacts would lie in {place}, inside the shared checkout {checkout}; nothing was run",
                hint="give --save a directory outside of the repository, or leave it out",
            )


def checked_out(found: repository.Repository) -> str:
    """The branch that the operator's checkout is on: the run's own, where none was named."""
    shared = git.shared(str(found.common_dir), git_dir=str(found.git_dir))
    head = shared.run("symbolic-ref", "--quiet", "HEAD", ok=(0, 1))
    if head.code:
        raise LionwtError(
            "target_invalid",
            f"{found.checkout} is on no branch; nothing was run",
            hint="name the run's own branch: lionwt li --target BRANCH ARGS",
        )
    return names.short_branch(git.text(head.out).strip())


def refuse_unleased(event: str, arguments: tuple[Any, ...]) -> None:
    """lionagi started anew by itself would be without the adapter: in the background, or by a schedule."""
    if event != "subprocess.Popen":
        return
    words = [str(word) for word in arguments[1]] if isinstance(arguments[1], (list, tuple)) else []
    by_name = os.path.basename(words[0]) == "li" and words[1:2] in (["o"], ["orchestrate"]) if words else False
    if by_name or words[1:3] == ["-m", "lionagi.cli"]:
        raise LionwtError(
            "usage",
            "li would start itself once more, where its workers would have no leases; that was not done",
            hint="leave --background out: put the whole command into the background instead",
        )

"""The places in lionagi where the adapter takes hold, and whether they are as it knows them.

Nothing of lionagi promises to stay. So every seam is looked at before anything
runs: the release must be one that has been tried, the function must have the
very source that was read, and whoever imported it by name must hold that one.
Otherwise the command is refused in one sentence: a worker that slipped past a
seam would write into the operator's checkout.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from typing import Any, Final

from lionwt.errors import LionwtError
from lionwt.lionagi.providers import PROVIDERS, REFUSED

#: The releases that have been tried, by their first two numbers.
RELEASES: Final = ("0.36",)

_ORCHESTRATE: Final = "lionagi.cli.orchestrate"
#: Module, name, and the beginning of the SHA-256 of the source that was read.
SEAMS: Final[tuple[tuple[str, str, str], ...]] = (
    (f"{_ORCHESTRATE}._orchestration", "setup_orchestration", "a6413ddd4acc8592"),
    (f"{_ORCHESTRATE}._orchestration", "build_worker_branch", "e672e45a30c256da"),
    (f"{_ORCHESTRATE}._orchestration", "OrchestrationEnv.assign_name", "43251f253c16a245"),
    (f"{_ORCHESTRATE}.fanout", "_run_fanout", "dadea40bdc6c82ad"),
    (f"{_ORCHESTRATE}.fanout", "_run_fanout_inner", "a93044db590dd539"),
    (f"{_ORCHESTRATE}.fanout", "_fresh_synthesis_branch", "3a43848918c0645f"),
    (f"{_ORCHESTRATE}.flow", "_run_flow", "0c020934ce381de8"),
    (f"{_ORCHESTRATE}.flow", "_run_flow_inner", "0a4529039d17331b"),
    (f"{_ORCHESTRATE}.flow", "_resume_flow", "db9a107215a5bcb5"),
    (f"{_ORCHESTRATE}.flow", "_build_dag", "4c2901bba1fb6d95"),
    (f"{_ORCHESTRATE}.flow", "_execute_dag", "6bb5ca497157561f"),
    (f"{_ORCHESTRATE}.flow", "_retarget_spawn_prompt", "5c57cb77bbadc94a"),
    (f"{_ORCHESTRATE}._common", "_ARTIFACT_SECTION_WITH_DIR", "dc74df26923fc8ce"),
    (f"{_ORCHESTRATE}._common", "retarget_artifact_section", "2f0fa63da84cc1f9"),
    ("lionagi.cli._runs", "allocate_run", "68fef3832e2b7d5b"),
    ("lionagi.operations.node", "Operation._invoke", "571a70ffbf972f79"),
    ("lionagi.operations.flow", "ReactiveExecutor._accept_node", "6f1c16e8af38fcdf"),
    ("lionagi.operations.flow", "ReactiveExecutor._assign_injected_branch", "15ad1ba40e621372"),
    ("lionagi.providers._cli_subprocess", "ndjson_from_cli", "4b6cfecd2f49f9f2"),
    ("lionagi.providers.anthropic.claude_code", "_ndjson_from_cli", "fdc72fee9069269f"),
    ("lionagi.providers.openai.codex", "_ndjson_from_cli", "3fcd76fe6059a31d"),
    ("lionagi.providers.openai.codex", "_linked_worktree_git_writable_roots", "a70ea812b10b15c8"),
    ("lionagi.providers.google.gemini_code", "_ndjson_from_cli", "3eb0c97b92ff9e67"),
    ("lionagi.providers.pi.cli", "_ndjson_from_cli", "297beec46141caed"),
    ("lionagi.session.branch", "Branch.clone", "9aedf283511683ca"),
    ("lionagi.service.imodel", "iModel.copy", "2c372d49e6659537"),
)
#: Where the four providers start their programs.
PROVIDER_MODULES: Final = (
    "lionagi.providers.anthropic.claude_code",
    "lionagi.providers.openai.codex",
    "lionagi.providers.google.gemini_code",
    "lionagi.providers.pi.cli",
)
#: Modules that imported a seam by its name, and have to hold the same.
BY_NAME: Final[tuple[tuple[str, str, str], ...]] = (
    (f"{_ORCHESTRATE}.fanout", "setup_orchestration", f"{_ORCHESTRATE}._orchestration"),
    (f"{_ORCHESTRATE}.flow", "setup_orchestration", f"{_ORCHESTRATE}._orchestration"),
    (_ORCHESTRATE, "_run_fanout", f"{_ORCHESTRATE}.fanout"),
    (_ORCHESTRATE, "_run_flow", f"{_ORCHESTRATE}.flow"),
    *((place, "ndjson_from_cli", "lionagi.providers._cli_subprocess") for place in PROVIDER_MODULES),
)


def require_supported() -> None:
    """Raise ``lionagi_unsupported`` unless this lionagi is one whose workers can be kept in leases."""
    try:
        release = importlib.import_module("lionagi.version").__version__
    except ImportError:
        raise _unsupported("lionagi is not installed for this Python", "pip install 'lionwt[lionagi]'") from None
    if ".".join(str(release).split(".")[:2]) not in RELEASES:
        raise _unsupported(
            f"lionagi {release} is not one of the releases that have been tried ({', '.join(RELEASES)})",
            f"pip install 'lionagi=={RELEASES[-1]}.*', or run li without lionwt",
        )
    for place, name, known in SEAMS:
        if digest(place, name) != known:
            raise _changed(release, f"{place}.{name}")
    for place, name, origin in BY_NAME:
        if getattr(module(place), name, None) is not getattr(module(origin), name, place):
            raise _changed(release, f"{place}.{name}")
    if new := sorted(_agentic() - set(PROVIDERS) - set(REFUSED)):
        raise _changed(release, f"the providers {', '.join(new)}")


def _agentic() -> set[str]:
    """Every provider of lionagi's that works by itself."""
    listed = module("lionagi.service.connections.registry").EndpointRegistry.list_providers()
    return {str(entry["provider"]) for entry in listed if entry["type"] == "agentic"}


def digest(place: str, name: str) -> str:
    found: Any = module(place)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        return ""
    try:
        source = found if isinstance(found, str) else inspect.getsource(found)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def module(place: str) -> Any:
    """A module of lionagi's, or None."""
    try:
        importlib.import_module(place)
    except ImportError:
        return None
    return sys.modules[place]  # a package may offer something else under the name of its module


def _changed(release: str, what: str) -> LionwtError:
    return _unsupported(
        f"lionagi {release} has changed {what}, where lionwt takes hold",
        "run li without lionwt, or install a lionagi that lionwt knows",
    )


def _unsupported(what: str, hint: str) -> LionwtError:
    return LionwtError("lionagi_unsupported", f"{what}; nothing was run", hint=hint)

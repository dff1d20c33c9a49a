"""Whether this lionagi is one that the turn adapter knows: looked at before anything is changed.

What the adapter replaces or calls must be there, of the kind and with the parameters that lionagi
0.36.0 has, in that order. New optional parameters do no harm. Everything else is refused in one
sentence: a conversation that is half in turns is worse than one that is not.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, Final

from lionwt.errors import LionwtError

OLDEST: Final = (0, 36, 0)

#: The nine operations, with the parameter that overrides the model of one call.
OPERATIONS: Final[dict[str, str | None]] = {
    "chat": "imodel",
    "chat_and_record": "imodel",
    "parse": None,
    "interpret": "interpret_model",
    "operate": "chat_model",
    "communicate": "chat_model",
    "ReAct": "analysis_model",
    "ReActStream": "analysis_model",
    "run": "chat_model",
}
STREAMS: Final = ("ReActStream", "run")

#: What is replaced on the class besides, and what is used of it.
_REACT: Final = (
    "self instruct instruction guidance context interpret interpret_domain interpret_style interpret_sample "
    "interpret_model interpret_kwargs tools tool_schemas response_format intermediate_response_options "
    "intermediate_listable reasoning_effort extension_allowed max_extensions response_kwargs"
)
_METHODS: Final = {
    "chat": (
        "coroutine",
        "self instruction guidance context sender recipient request_fields response_format progression imodel "
        "tool_schemas images image_detail plain_content return_ins_res_message include_token_usage_to_model "
        "_turn_origin kwargs",
    ),
    "chat_and_record": ("coroutine", "self instruction kwargs"),
    "parse": (
        "coroutine",
        "self text handle_validation max_retries request_type operative similarity_algo similarity_threshold "
        "fuzzy_match handle_unmatched fill_value fill_mapping strict response_format",
    ),
    "interpret": ("coroutine", "self text domain style interpret_model kwargs"),
    "operate": (
        "coroutine",
        "self instruct instruction guidance context sender recipient progression chat_model invoke_actions "
        "tool_schemas images image_detail parse_model skip_validation tools operative response_format actions "
        "reason call_params action_strategy verbose_action field_models exclude_fields handle_validation "
        "include_token_usage_to_model stream_persist persist_dir middle kwargs",
    ),
    "communicate": (
        "coroutine",
        "self instruction guidance context plain_content sender recipient progression response_format "
        "request_fields chat_model parse_model skip_validation images image_detail num_parse_retries "
        "clear_messages include_token_usage_to_model kwargs",
    ),
    "ReAct": (
        "coroutine",
        f"{_REACT} display_as return_analysis analysis_model verbose verbose_length "
        "include_token_usage_to_model kwargs",
    ),
    "ReActStream": (
        "generator",
        f"{_REACT} analysis_model verbose display_as verbose_length include_token_usage_to_model kwargs",
    ),
    "run": (
        "generator",
        "self instruction chat_model guidance context sender recipient images image_detail stream_persist "
        "persist_dir snapshot_dir response_format kwargs",
    ),
    "emit": ("coroutine", "self event"),
    "drain_signals": ("coroutine", "self"),
    "_observed_run": ("coroutine", "self coro"),
    "_safe_emit": ("coroutine", "self event"),
    "_schedule_emit": ("function", "self msg"),
    "control": ("function", "self directive reason"),
    "poll_control": ("function", "self"),
}
_PROPERTIES: Final = ("chat_model", "parse_model", "last_context_report", "on_message_added")
_PRIVATE: Final = ("_observer", "_signal_tasks", "_message_manager")

RUN: Final = "lionagi.operations.run.run"
CHAT: Final = "lionagi.operations.chat.chat"
OBSERVE: Final = "lionagi.operations._observe"
SIGNAL: Final = "lionagi.session.signal"
CONTROL: Final = "lionagi.session.control"
LIFECYCLE: Final = "lionagi.session._lifecycle_ctx"

_FUNCTIONS: Final = {
    (RUN, "run"): ("generator", "branch instruction param"),
    (RUN, "_apply_context_providers"): ("coroutine", "branch instruction param ins"),
    (CHAT, "_apply_context_providers"): ("coroutine", "branch instruction param ins"),
    (OBSERVE, "emit_message"): ("coroutine", "branch msg"),
    (SIGNAL, "build_run_end"): ("function", "branch duration_ms result"),
    (CONTROL, "LoopControl"): ("class", "directive reason"),
    (CONTROL, "LoopDirective"): ("class", ""),
    (OBSERVE, "StopStream"): ("class", ""),
    (LIFECYCLE, "suppress_lifecycle_var"): ("ContextVar", ""),
}


def unsupported(
    what: str, hint: str = "install the lionagi that lionwt knows: pip install 'lionagi==0.36.0'"
) -> LionwtError:
    """The one refusal of this lionagi, as an exception to raise."""
    return LionwtError("lionagi_unsupported", f"{what}; nothing was changed", hint=hint)


def require() -> Any:
    """lionagi's Branch, when all that the adapter needs is as it knows it; else LionwtError."""
    try:
        lionagi: Any = import_module("lionagi")
        branch = import_module("lionagi.session.branch").Branch
    except ModuleNotFoundError as error:
        hint = "install it with lionwt: pip install 'lionwt[lionagi]'"
        raise unsupported(f"lionagi cannot be imported ({error})", hint) from error
    _require_version(str(getattr(lionagi, "__version__", "")))
    for name, (kind, parameters) in _METHODS.items():
        _require_kind(f"Branch.{name}", inspect.getattr_static(branch, name, None), kind, parameters)
    for name in _PROPERTIES:
        if not isinstance(inspect.getattr_static(branch, name, None), property):
            raise unsupported(f"this lionagi has no property Branch.{name}")
    for name in _PRIVATE:
        if name not in branch.__private_attributes__:
            raise unsupported(f"this lionagi has no Branch.{name}")
    for (module, name), (kind, parameters) in _FUNCTIONS.items():
        try:
            found = getattr(import_module(module), name, None)
        except ModuleNotFoundError:
            raise unsupported(f"this lionagi has no module {module}") from None
        _require_kind(f"{module}.{name}", found, kind, parameters)
    _require_signals()
    return branch


def _require_version(version: str) -> None:
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if len(numbers) < 2 or numbers < OLDEST[: len(numbers)]:
        raise unsupported(f"the turn adapter needs lionagi 0.36.0 or newer, this is {version or 'of no version'}")


def _require_kind(name: str, found: Any, kind: str, parameters: str) -> None:
    if found is None:
        raise unsupported(f"this lionagi has no {name}")
    kinds = {
        "coroutine": inspect.iscoroutinefunction(found),
        "generator": inspect.isasyncgenfunction(found),
        "function": inspect.isfunction(found) and not inspect.iscoroutinefunction(found),
        "class": inspect.isclass(found),
        "ContextVar": type(found).__name__ == "ContextVar",
    }
    if not kinds[kind]:
        raise unsupported(f"{name} of this lionagi is not the {kind} that the turn adapter knows")
    if parameters:
        known = parameters.split()
        has = inspect.signature(found).parameters
        added = [parameter for key, parameter in has.items() if key not in known]
        optional = all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in added)
        if [key for key in has if key in known] != known or not optional:
            raise unsupported(f"{name} of this lionagi takes other parameters than the turn adapter knows")


def _require_signals() -> None:
    signal = import_module(SIGNAL)
    for name in ("RunStart", "RunEnd", "RunFailed"):
        found = getattr(signal, name, None)
        if not inspect.isclass(found) or not hasattr(found, "model_fields"):
            raise unsupported(f"this lionagi has no signal {name}")
        if "turn_id" in found.model_fields:
            raise unsupported("this lionagi stamps its turns itself", "use it without the turn adapter")

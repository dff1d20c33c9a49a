"""The error tree and the one table of exit codes.

Every refusal has a stable word (``error.code``) that programs branch on, one
exit code, and a message for the person who reads it at night: what happened,
what was left untouched, what to type next. :data:`CODES` is that table; the
README's copy is generated from it and a test compares the two.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

OK: Final = 0
BUG: Final = 1
USAGE: Final = 2
REFUSED: Final = 3
ATTENTION: Final = 4
TEARDOWN_FAILED: Final = 5
BUSY: Final = 6
STATE: Final = 7
SYSTEM: Final = 8
SIGNAL: Final = 128  # plus the signal's number

#: Of several results, the first of these that is present is the answer.
PRECEDENCE: Final = (BUG, SYSTEM, STATE, TEARDOWN_FAILED, ATTENTION, REFUSED, BUSY, USAGE, OK)

EXIT_MEANINGS: Final[dict[int, str]] = {
    OK: "the asked outcome holds",
    BUG: "a bug in lionwt",
    USAGE: "the command line is wrong",
    REFUSED: "refused by a rule, or ended as discarded where a landing was asked",
    ATTENTION: "a person must look",
    TEARDOWN_FAILED: "the outcome stands, but something could not be removed",
    BUSY: "busy, try again",
    STATE: "state unreadable or ambiguous, or the repository is not what the run recorded",
    SYSTEM: "git or the system failed",
    SIGNAL: "ended by signal n",
}


class Code(NamedTuple):
    """One row of the table: the exit code and the meaning of an error word."""

    exit_code: int
    meaning: str


CODES: Final[dict[str, Code]] = {
    "bug": Code(BUG, "lionwt itself failed; the message says where"),
    "usage": Code(USAGE, "an argument or option is missing, unknown or malformed"),
    "config_invalid": Code(USAGE, "lionwt.toml cannot be understood"),
    "protected_target": Code(REFUSED, "the target is a branch that a landing may never move"),
    "target_invalid": Code(REFUSED, "the target is not the name of an existing branch"),
    "id_invalid": Code(REFUSED, "a run or worker id is not a safe name"),
    "id_reused": Code(REFUSED, "the id has been used before, or folds to one that has"),
    "name_taken": Code(REFUSED, "a branch or path of that name is already there"),
    "policy_mismatch": Code(REFUSED, "the policy differs from the one the run pinned"),
    "run_mismatch": Code(REFUSED, "an argument differs from what the run pinned"),
    "run_unknown": Code(REFUSED, "the run has not been opened"),
    "lease_unknown": Code(REFUSED, "the worker has no lease in this run"),
    "shared_host": Code(REFUSED, "the policy allocates no worktrees"),
    "called_by_worker": Code(REFUSED, "a worker never completes itself"),
    "grants_mismatch": Code(REFUSED, "the granted paths are not the lease's"),
    "wrong_state": Code(REFUSED, "the lease is not in the state that the verb needs"),
    "check_wrote": Code(REFUSED, "a check changed the worktree that it was to look at; nothing was frozen"),
    "already_done": Code(REFUSED, "it was done before, with other arguments"),
    "candidate_mismatch": Code(REFUSED, "the candidate is not the one that was frozen"),
    "repository_unsupported": Code(REFUSED, "a bare or unborn repository, or none"),
    "filter_untrusted": Code(REFUSED, "a filter program is named by the repository's own config only"),
    "path_unsafe": Code(REFUSED, "a path that lionwt must own leads elsewhere"),
    "lionagi_unsupported": Code(REFUSED, "lionagi is missing, or is not one that the adapter knows"),
    "path_escape": Code(REFUSED, "a path leaves the lease"),
    "worker_failed": Code(REFUSED, "the worker failed or was cancelled; nothing was landed"),
    "validation_missing": Code(REFUSED, "a declared validation has no result; nothing was landed"),
    "validation_failed": Code(REFUSED, "a validation is red; nothing was landed"),
    "predecessor_failed": Code(REFUSED, "a predecessor ended without landing; nothing was landed"),
    "target_moved": Code(ATTENTION, "the target is not where this run left it"),
    "merge_conflict": Code(ATTENTION, "the change does not merge into the target"),
    "checkout_blocked": Code(ATTENTION, "something in the operator's checkout is in the way"),
    "patch_missing": Code(ATTENTION, "the worker's change could not be captured whole, or its patch is gone"),
    "patch_changed": Code(ATTENTION, "the frozen evidence is not what was frozen"),
    "worktree_unmerged": Code(ATTENTION, "the worktree is mid-merge, or carries history from elsewhere"),
    "path_reserved": Code(ATTENTION, "the change has files where lionwt keeps the worktrees"),
    "landed_then_reverted": Code(ATTENTION, "landed, but a later commit took some of it back"),
    "embedded_repository": Code(ATTENTION, "a repository inside the worktree that git cannot represent"),
    "checkout_behind": Code(ATTENTION, "landed, but some files of the checkout were left as they are"),
    "orphan": Code(ATTENTION, "a worktree, branch or anchor of lionwt's that no lease file speaks of"),
    "teardown_failed": Code(TEARDOWN_FAILED, "the worktree or the branch could not be removed"),
    "worker_alive": Code(BUSY, "a process still works in the lease"),
    "worktree_changing": Code(BUSY, "the worktree keeps changing while it is captured"),
    "predecessor_pending": Code(BUSY, "a predecessor is not terminal yet"),
    "not_frozen": Code(BUSY, "the worker has not been frozen yet"),
    "owner_alive": Code(BUSY, "the owner of a lease is alive, or declared to be nobody"),
    "run_interrupted": Code(BUSY, "the run has leases of a dead owner; reconcile it first"),
    "lock_timeout": Code(BUSY, "another lionwt holds the lock"),
    "state_unreadable": Code(STATE, "a state file is torn, foreign or not readable"),
    "schema_newer": Code(STATE, "a state file was written by a newer lionwt"),
    "repository_moved": Code(STATE, "the repository or checkout is not where or what the run recorded"),
    "repository_unsafe": Code(STATE, "the shared configuration was changed so that git acts elsewhere"),
    "worktree_moved": Code(STATE, "the worktree is not the one that was leased"),
    "clock_wrong": Code(STATE, "the clock stands before the lease was made; nothing is deleted by it"),
    "git_failed": Code(SYSTEM, "git failed"),
    "git_unsupported": Code(SYSTEM, "git is missing or too old"),
    "git_timeout": Code(SYSTEM, "git did not answer in time"),
    "no_space": Code(SYSTEM, "no space left"),
    "permission": Code(SYSTEM, "no permission"),
    "system": Code(SYSTEM, "the operating system refused"),
    "interrupted": Code(SIGNAL, "a signal ended the command"),
}


#: What to do about a permission that is missing.
OWNER: Final = "check who owns it, then run the same command again"

#: A hint that ends in a command says it after a colon. Of the command only words that are quoted as a shell wants
#: them are taken: what a quoted name holds begins no command of its own.
_COMMAND: Final = re.compile(
    r"""(?:^|: )((?:lionwt|git|rm|mkdir)(?: (?:&&|(?:[\w@%+=:,./-]|'[^']*'|"'")+(?<!:)))+)\Z""", re.ASCII
)


class LionwtError(Exception):
    """A refusal or failure, as the person and the program see it.

    ``code`` is a word of :data:`CODES`; ``message`` says what happened and what
    was left untouched; ``hint`` says what to type next; ``diagnostics`` carries
    details that belong into evidence.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        hint: str | None = None,
        diagnostics: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.diagnostics = diagnostics or {}

    @property
    def next(self) -> list[str]:
        """The command that the hint ends in, as one types it."""
        found = _COMMAND.search(self.hint or "")
        return [found[1]] if found else []

    def as_object(self) -> dict[str, str | None]:
        """Code, message and hint, as JSON answers carry them."""
        return {"code": self.code, "message": self.message, "hint": self.hint}

    @property
    def exit_code(self) -> int:
        """The exit code of this error's word (design section 5)."""
        return CODES[self.code].exit_code


def having_left(error: LionwtError, untouched: str) -> LionwtError:
    """A failure of git or the system, which says what was left as it was; any other error as it is.

    Who meets it knows what failed; only the verb knows what that did not touch.
    """
    if error.exit_code != SYSTEM or untouched in error.message:
        return error
    return LionwtError(error.code, f"{error.message}; {untouched}", hint=error.hint, diagnostics=error.diagnostics)


@contextlib.contextmanager
def leaving(untouched: str) -> Iterator[None]:
    """Let a failure that happens within say what was left as it was (:func:`having_left`)."""
    try:
        yield
    except LionwtError as error:
        raise having_left(error, untouched) from error.__cause__


def from_os_error(error: OSError, doing: str, otherwise: str | None = None) -> LionwtError:
    """Name the operating system's refusal while ``doing`` something.

    ``otherwise`` is the hint where it is neither space nor permission that is missing.
    """
    import errno

    hint: str | None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        code, hint = "no_space", "free some space, then run the same command again"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        code, hint = "permission", OWNER
    else:
        code, hint = "system", otherwise
    name = f": {error.filename!r}" if error.filename else ""
    if len(name) > 400:  # a worker's path may be as long as the system takes
        name = f"{name[:200]}…{name[-200:]}"
    return LionwtError(code, f"{doing}: {error.strerror or error}{name}", hint=hint)


def as_told(error: LionwtError | OSError, doing: str) -> LionwtError:
    """Whatever refused, as a person is told of it: the system's words with what lionwt was ``doing``."""
    return from_os_error(error, doing) if isinstance(error, OSError) else error


def worst(exit_codes: list[int]) -> int:
    """The one exit code that stands for several (design section 5)."""
    for code in PRECEDENCE:
        if code in exit_codes:
            return code
    return max(exit_codes, default=OK)

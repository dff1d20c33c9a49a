"""Answers as values: exit codes and their precedence, the table of error words, and escaping."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lionwt
from lionwt import errors
from lionwt.answers import Answer, escaped, of_error, of_interruption
from lionwt.errors import CODES, EXIT_MEANINGS, LionwtError, worst
from tests import readme_codes

SOURCE = Path(lionwt.__file__).parent

#: The words that design 5 lists, with their exit codes by its meanings.
DESIGNED = {
    "protected_target": 3,
    "id_invalid": 3,
    "id_reused": 3,
    "policy_mismatch": 3,
    "called_by_worker": 3,
    "validation_missing": 3,
    "validation_failed": 3,
    "worker_failed": 3,
    "predecessor_failed": 3,
    "target_moved": 4,
    "merge_conflict": 4,
    "checkout_blocked": 4,
    "patch_missing": 4,
    "patch_changed": 4,
    "worktree_unmerged": 4,
    "embedded_repository": 4,
    "teardown_failed": 5,
    "worker_alive": 6,
    "predecessor_pending": 6,
    "lock_timeout": 6,
    "state_unreadable": 7,
    "schema_newer": 7,
    "repository_moved": 7,
    "git_failed": 8,
    "no_space": 8,
}


def raised_words() -> dict[str, str]:
    """Every word that the source gives to a LionwtError as a literal, and where."""
    found = {}
    for path in SOURCE.glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", None) != "LionwtError" or not node.args:
                continue
            first = node.args[0]
            if isinstance(first, ast.Constant):
                found[str(first.value)] = f"{path.name}:{node.lineno}"
    return found


def test_every_error_word_has_an_exit_code_that_means_something() -> None:
    """Design 5: one table in the code, every word with one of the exit codes 1 to 8 or a signal's."""
    for word, code in CODES.items():
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", word)
        assert code.exit_code in set(EXIT_MEANINGS) - {0}, word
        assert code.meaning and code.meaning[0].islower() and not code.meaning.endswith("."), word


def test_every_word_that_is_raised_is_in_the_table() -> None:
    """Design 5: error.code is a stable word; a word outside the table would end as a bug."""
    strangers = {word: where for word, where in raised_words().items() if word not in CODES}
    assert not strangers


def test_every_word_of_the_table_stands_in_the_source() -> None:
    """A word that nothing can answer promises what does not exist."""
    text = "".join(path.read_text("utf-8") for path in SOURCE.glob("**/*.py") if path.name != "errors.py")
    text += (SOURCE / "errors.py").read_text("utf-8").partition("class LionwtError")[2]
    unused = {word for word in CODES if f'"{word}"' not in text}
    assert not unused


@pytest.mark.parametrize(("word", "exit_code"), DESIGNED.items())
def test_the_words_of_the_design_keep_their_exit_codes(word: str, exit_code: int) -> None:
    """Design 5: programs branch on the word and the exit code; neither may change."""
    assert CODES[word].exit_code == exit_code


@pytest.mark.parametrize(
    ("codes", "answer"),
    [
        ([0, 0], 0),
        ([0, 6], 6),
        ([6, 3], 3),
        ([3, 4, 6], 4),
        ([4, 5, 3], 5),
        ([5, 7, 4], 7),
        ([7, 8, 5], 8),
        ([8, 1, 0], 1),
        ([0, 6, 3, 4, 5, 7, 8, 1], 1),
        ([], 0),
    ],
)
def test_the_first_present_of_the_precedence_stands_for_all(codes: list[int], answer: int) -> None:
    """Design 5: several records: the first present of 1, 8, 7, 5, 4, 3, 6, 0."""
    assert worst(codes) == answer
    assert worst(codes[::-1]) == answer


def test_the_readme_holds_the_current_tables() -> None:
    """Design 5: one table in the code is the source of the README's (python -m tests.readme_codes)."""
    text = readme_codes.README.read_text("utf-8")
    assert readme_codes.brought_up_to_date(text) == text
    for word in CODES:
        assert text.count(f"| `{word}` |") == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä 漢 🦁 → 'x' \\", "plain ä 漢 🦁 → 'x' \\"),
        ("\x00\x07\t\n\r\x1b[31m", "\\x00\\x07\\x09\\x0a\\x0d\\x1b[31m"),
        ("\x7f\x80\x9b\x9f\xa0", "\\x7f\\x80\\x9b\\x9f\xa0"),
        ("\u061c\u200e\u200f\u202a\u202e\u2066\u2069", "\\u061c\\u200e\\u200f\\u202a\\u202e\\u2066\\u2069"),
        ("\u2028\u2029\ufeff", "\\u2028\\u2029\\ufeff"),
        ("\udcff\udc80\ud800", "\\udcff\\udc80\\ud800"),
    ],
)
def test_what_could_steer_a_terminal_is_spelled_out(text: str, shown: str) -> None:
    """Invariant 21: no control bytes on a terminal; everything else stays readable."""
    assert escaped(text) == shown


def test_a_hint_that_ends_in_a_command_tells_programs_the_same() -> None:
    """Design 5: next holds commands that one can type."""
    for hint, following in [
        ("start it first: lionwt start r1 w1", ["lionwt start r1 w1"]),
        ("lionwt reconcile r1", ["lionwt reconcile r1"]),
        ("look at it: git -C /a status", ["git -C /a status"]),
        ("lionwt keeps the worktrees there: move it away", []),
        ("the lionwt that wrote it; a newer one", []),
        (None, []),
    ]:
        error = LionwtError("usage", "x", hint=hint)
        assert error.next == following, hint
        assert of_error("lease", error).as_object()["next"] == following


def test_the_answer_of_a_signal_carries_128_and_its_number() -> None:
    """Design 5: 128+n signal."""
    found = of_interruption("freeze", 15).as_object()
    assert (found["exit_code"], found["ok"]) == (143, False)
    assert found["error"]["code"] == "interrupted"
    assert found["error"]["message"].startswith("interrupted by SIGTERM; ")


def test_an_answer_always_has_the_five_keys_first() -> None:
    """Design 5: the shape of every JSON object."""
    found = Answer("status", payload={"leases": []}).as_object()
    assert list(found) == ["schema", "ok", "exit_code", "error", "next", "leases"]
    assert found["schema"] == "lionwt/status@1"


def test_what_the_operating_system_says_has_a_word_of_its_own() -> None:
    """Design 5: 8 for no space, no permission, and the rest."""
    import errno

    for number, word in [
        (errno.ENOSPC, "no_space"),
        (errno.EDQUOT, "no_space"),
        (errno.EACCES, "permission"),
        (errno.EROFS, "permission"),
        (errno.EIO, "system"),
    ]:
        error = errors.from_os_error(OSError(number, "said", "/a\x1bb"), "writing")
        assert (error.code, error.exit_code) == (word, 8)
        assert error.message == "writing: said: '/a\\x1bb'"


def test_an_answer_that_could_not_be_written_is_not_written_later(tmp_path: Path) -> None:
    """Section 5: what is on stdout says the exit code that the command has; a disk that is full for a moment, too."""
    program = """
import errno, io, sys
from lionwt import answers

class FullOnce(io.FileIO):
    failed = False
    def write(self, data):
        if not self.failed:
            self.failed = True
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)

sys.stdout = io.TextIOWrapper(io.BufferedWriter(FullOnce(1, "w", closefd=False)))
sys.exit(answers.show(answers.Answer("status", lines=[]), True))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (8, b""), done
    assert done.stderr == b"lionwt: the answer (exit code 0) could not be written: No space left on device\n"

"""The README's tables of exit codes and error words: ``python -m tests.readme_codes`` brings them up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from lionwt.errors import CODES, EXIT_MEANINGS, SIGNAL

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- error codes -->", "<!-- /error codes -->"


def tables() -> str:
    """Both tables in Markdown, from the one table in the code."""
    lines = ["| exit | means |", "|---|---|"]
    lines += [f"| {_number(number)} | {meaning} |" for number, meaning in sorted(EXIT_MEANINGS.items())]
    lines += ["", "| `error.code` | exit | means |", "|---|---|---|"]
    lines += [f"| `{word}` | {_number(code.exit_code)} | {code.meaning} |" for word, code in CODES.items()]
    return "\n".join(lines)


def _number(exit_code: int) -> str:
    return f"{SIGNAL}+n" if exit_code == SIGNAL else str(exit_code)


def brought_up_to_date(text: str) -> str:
    """``text`` with the tables between the two markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{README} lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def main() -> None:
    """Rewrite the README where its tables are behind."""
    text = README.read_text("utf-8")
    now = brought_up_to_date(text)
    if now != text:
        README.write_text(now, "utf-8")
        sys.stdout.write(f"{README}: brought up to date\n")


if __name__ == "__main__":
    main()

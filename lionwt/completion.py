"""Completion scripts for bash, zsh and fish, made from the command tree.

``python -m lionwt.completion DIR`` (``make completions``) writes them. They are
static, so that pressing TAB never starts Python; run ids and worker ids are
read from the names of files. Such a name comes from whoever can write there,
so only what looks like an id is offered, and nothing is ever evaluated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.main

from lionwt.cli import app

#: What a value is, by the word that stands for it in help.
_KINDS = {"RUN": "run", "WORKER": "worker", "DIR": "directory", "FILE": "file"}
_MADE = "Made by `make completions` from the command tree; changes belong into lionwt/completion.py."


@dataclass(frozen=True)
class Option:
    """An option; ``kind`` says what its value is: "" for a flag, "any" for what cannot be completed."""

    names: tuple[str, ...]
    help: str
    kind: str
    choices: tuple[str, ...]
    repeatable: bool


@dataclass(frozen=True)
class Command:
    """A sub-command, or the command itself, with the kinds of its arguments; the last may repeat."""

    name: str
    help: str
    options: tuple[Option, ...]
    arguments: tuple[str, ...]
    repeats: bool

    def places(self) -> Iterator[tuple[int, str, bool]]:
        """Number, kind, and whether it repeats, of every argument that can be completed."""
        for number, kind in enumerate(self.arguments):
            last = number == len(self.arguments) - 1
            # Where RUN may be left out, a single argument is a worker of $LIONAGI_RUN_ID.
            yield number, "run or worker" if kind == "run" and not last else kind, last and self.repeats


def commands() -> tuple[Command, list[Command]]:
    """The command itself and its sub-commands."""
    group: Any = typer.main.get_command(app)
    return _command("lionwt", group), [_command(name, command) for name, command in group.commands.items()]


def _command(name: str, command: Any) -> Command:
    options, arguments, repeats = [], [], False
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            arguments.append(_KINDS.get(parameter.metavar, "any"))
            repeats = parameter.nargs != 1
        else:
            options.append(_option(parameter))
    options.append(Option(("-h", "--help"), "Show this message and exit.", "", (), False))
    return Command(name, _first_sentence(command.help or ""), tuple(options), tuple(arguments), repeats)


def _option(parameter: Any) -> Option:
    choices = tuple(_choices(parameter))
    kind = "" if parameter.is_flag else "choice" if choices else _KINDS.get(parameter.metavar, "any")
    return Option(tuple(parameter.opts), parameter.help or "", kind, choices, bool(parameter.multiple))


def _choices(parameter: Any) -> list[str]:
    # The parser's own name for it has changed over typer's versions.
    described = getattr(parameter, "type_descriptor", None) or getattr(parameter, "type", None)
    found = getattr(described, "choices", None)
    return [str(choice) for choice in found or ()]


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


_BASH = r"""# bash completion for lionwt. @MADE@

_lionwt_offer() { # WORD...: those that look like names and begin with what was typed
    local word
    for word; do
        if [[ $word == "$cur"* && $word != *[!A-Za-z0-9._-]* ]]; then COMPREPLY+=("$word"); fi
    done
}

_lionwt_offer_id() {
    if [[ $1 == [A-Za-z0-9]* ]]; then _lionwt_offer "$1"; fi
}

_lionwt_runs() {
    local path
    for path in "${LIONAGI_HOME:-$HOME/.lionagi}"/runs/*/; do
        path=${path%/}
        _lionwt_offer_id "${path##*/}"
    done
    if [[ $cur == */* ]]; then
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -d -- "$cur")
    fi
}

_lionwt_workers() { # [RUN]
    local run=${1:-$LIONAGI_RUN_ID} path
    if [[ -z $run ]]; then return; fi
    if [[ $run != */* ]]; then run=${LIONAGI_HOME:-$HOME/.lionagi}/runs/$run; fi
    for path in "$run"/workspaces/*.json; do
        path=${path##*/}
        _lionwt_offer_id "${path%.json}"
    done
}

_lionwt() {
    local cur=${COMP_WORDS[COMP_CWORD]} command='' ended='' wants='' word i
    local -a places=()
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ -n $wants ]]; then
            if [[ $word != = ]]; then wants=''; fi
        elif [[ -z $ended && $word == -- ]]; then
            ended=yes
        elif [[ -z $ended && $word == -* ]]; then
            case "$command $word" in
@VALUES@
            esac
        elif [[ -z $command ]]; then
            command=$word
        else
            places+=("$word")
        fi
    done
    if [[ $cur == = ]]; then cur=''; fi
    case $wants in
        '') ;;
        any) return ;;
        worker) _lionwt_workers "${places[0]}"; return ;;
        file | directory)
            compopt -o filenames
            mapfile -t COMPREPLY < <(compgen -"${wants:0:1}" -- "$cur")
            return
            ;;
        *) _lionwt_offer $wants; return ;;
    esac
    if [[ -z $ended && $cur == -* ]]; then
        case $command in
@OPTIONS@
        esac
        return
    fi
    case "$command ${#places[@]}" in
        ' 0') _lionwt_offer @COMMANDS@ ;;
@ARGUMENTS@
    esac
}

complete -F _lionwt lionwt
"""


def bash() -> str:
    """The script for bash (4 and newer)."""
    root, subs = commands()
    values = []
    for c in subs:
        for option in c.options:
            if option.kind:
                patterns = " | ".join(_sh(f"{c.name} {name}") for name in option.names)
                wants = " ".join(option.choices) or option.kind
                values.append(f"                {patterns}) wants={_sh(wants)} ;;")
    options = [f"            {_sh('' if c is root else c.name)}) _lionwt_offer {_names(c)} ;;" for c in (root, *subs)]
    arguments = [
        f"        {_sh(c.name + ' ')}{'*' if repeats else number}) {_BASH_ARGUMENTS[kind]} ;;"
        for c in subs
        for number, kind, repeats in c.places()
        if kind in _BASH_ARGUMENTS
    ]
    return _filled(
        _BASH,
        VALUES=values,
        OPTIONS=options,
        COMMANDS=[" ".join(c.name for c in subs)],
        ARGUMENTS=arguments,
    )


_BASH_ARGUMENTS = {
    "run": "_lionwt_runs",
    "run or worker": "_lionwt_workers; _lionwt_runs",
    "worker": '_lionwt_workers "${places[0]}"',
}


def _names(command: Command) -> str:
    return " ".join(name for option in command.options for name in option.names)


_ZSH = r"""#compdef lionwt
# zsh completion for lionwt. @MADE@

_lionwt_runs() {
    setopt localoptions extendedglob
    local -a found
    found=(${LIONAGI_HOME:-$HOME/.lionagi}/runs/*(N/:t))
    found=(${(M)found:#[A-Za-z0-9][A-Za-z0-9._-]#})
    _wanted runs expl run compadd -a found || _directories
}

_lionwt_workers() {
    setopt localoptions extendedglob
    local run=${line[1]:-$LIONAGI_RUN_ID}
    local -a found
    [[ -n $run ]] || return 1
    [[ $run == */* ]] || run=${LIONAGI_HOME:-$HOME/.lionagi}/runs/$run
    found=($run/workspaces/*.json(N:t:r))
    found=(${(M)found:#[A-Za-z0-9][A-Za-z0-9._-]#})
    _wanted workers expl worker compadd -a found
}

_lionwt_runs_or_workers() {
    local -a line
    local tried=1
    _lionwt_workers && tried=0
    _lionwt_runs && tried=0
    return tried
}

_lionwt() {
    local curcontext=$curcontext state line
    local -A opt_args
    local -a commands
    _arguments -C \
@OPTIONS@
        '1: :->command' \
        '*:: :->arguments' && return
    case $state in
        command)
            commands=(
@COMMANDS@
            )
            _describe -t commands command commands
            ;;
        arguments)
            case $words[1] in
@ARGUMENTS@
            esac
            ;;
    esac
}

if [[ $funcstack[1] == _lionwt ]]; then _lionwt "$@"; else compdef _lionwt lionwt; fi
"""

_ZSH_ACTIONS = {
    "run": "_lionwt_runs",
    "run or worker": "_lionwt_runs_or_workers",
    "worker": "_lionwt_workers",
    "directory": "_directories",
    "file": "_files",
}


def zsh() -> str:
    """The script for zsh, to be found in ``fpath`` as ``_lionwt``."""
    root, subs = commands()
    arguments = []
    for c in subs:
        specs = [spec for option in c.options for spec in _zsh_option(option)]
        for number, kind, repeats in c.places():
            specs.append(_sh(f"{'*' if repeats else number + 1}:{kind}:{_ZSH_ACTIONS.get(kind, ' ')}"))
        indented = " \\\n                        ".join(specs)
        arguments.append(f"                {c.name})\n                    _arguments \\\n{' ' * 24}{indented}")
        arguments.append("                    ;;")
    return _filled(
        _ZSH,
        OPTIONS=[f"        {spec} \\" for option in root.options for spec in _zsh_option(option)],
        COMMANDS=[f"                {_sh(f'{c.name}:{c.help}')}" for c in subs],
        ARGUMENTS=arguments,
    )


def _zsh_option(option: Option) -> list[str]:
    text = option.help.replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    excluding = "*" if option.repeatable else f"({' '.join(option.names)})" if len(option.names) > 1 else ""
    action = f"({' '.join(option.choices)})" if option.choices else _ZSH_ACTIONS.get(option.kind, " ")
    value = f":{option.names[-1].lstrip('-')}:{action}" if option.kind else ""
    return [_sh(f"{excluding}{name}[{text}]{value}") for name in option.names]


_FISH = r"""# fish completion for lionwt. @MADE@

function __lionwt_words # the sub-command and its arguments that stand before the cursor
    set -l wants no
    set -l ended no
    for word in (commandline -opc)[2..-1]
        if test $wants = yes
            set wants no
        else if test $ended = yes
            echo -- $word
        else if test "$word" = --
            set ended yes
        else if contains -- "$word" @VALUES@
            set wants yes
        else if not string match -q -- '-*' "$word"
            echo -- $word
        end
    end
end

function __lionwt_bare # no sub-command yet
    test (count (__lionwt_words)) -eq 0
end

function __lionwt_in # COMMAND [FROM [TO]]: in it, with so many arguments before the cursor
    set -l words (__lionwt_words)
    test (count $words) -ge 1; and test $words[1] = $argv[1]; or return 1
    set -l place (math (count $words) - 1)
    set -q argv[2]; or return 0
    test $place -ge $argv[2]; or return 1
    not set -q argv[3]; or test $place -le $argv[3]
end

function __lionwt_home
    if test -n "$LIONAGI_HOME"
        echo -- $LIONAGI_HOME
    else
        echo -- $HOME/.lionagi
    end
end

function __lionwt_runs
    for path in (__lionwt_home)/runs/*/
        string match -r -- '(?<=/)[A-Za-z0-9][A-Za-z0-9._-]*(?=/$)' $path
    end
end

function __lionwt_workers
    set -l run (__lionwt_words)[2]
    test -n "$run"; or set run $LIONAGI_RUN_ID
    test -n "$run"; or return
    string match -q -- '*/*' $run; or set run (__lionwt_home)/runs/$run
    for path in $run/workspaces/*.json
        string match -r -- '(?<=/)[A-Za-z0-9][A-Za-z0-9._-]*(?=[.]json$)' $path
    end
end

complete -c lionwt -f
@OPTIONS@
@COMMANDS@
@ARGUMENTS@
"""

_FISH_VALUES = {
    "file": "-r -F",
    "directory": "-x -a '(__fish_complete_directories)'",
    "worker": "-x -a '(__lionwt_workers)'",
    "any": "-x",
    "": "",
}


def fish() -> str:
    """The script for fish (3.1 and newer)."""
    root, subs = commands()
    options = [f"complete -c lionwt -n __lionwt_bare {_fish_option(option)}" for option in root.options]
    arguments = []
    for c in subs:
        options += [f"complete -c lionwt -n '__lionwt_in {c.name}' {_fish_option(option)}" for option in c.options]
        for number, kind, repeats in c.places():
            here = f"complete -c lionwt -n '__lionwt_in {c.name} {number}{'' if repeats else f' {number}'}'"
            arguments += [f"{here} -a '(__lionwt_{what}s)' -d {what}" for what in ("run", "worker") if what in kind]
    return _filled(
        _FISH,
        VALUES=[" ".join(sorted({name for c in subs for option in c.options if option.kind for name in option.names}))],
        OPTIONS=options,
        COMMANDS=[f"complete -c lionwt -n __lionwt_bare -a {c.name} -d {_fish_quoted(c.help)}" for c in subs],
        ARGUMENTS=arguments,
    )


def _fish_option(option: Option) -> str:
    words = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    words.append(f"-x -a {_fish_quoted(' '.join(option.choices))}" if option.choices else _FISH_VALUES[option.kind])
    return " ".join(word for word in [*words, "-d", _fish_quoted(option.help.rstrip("."))] if word)


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _sh(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _filled(template: str, **parts: list[str]) -> str:
    text = template.replace("@MADE@", _MADE)
    for name, lines in parts.items():
        text = text.replace(f"@{name}@", "\n".join(lines))
    return text


SCRIPTS = {"lionwt.bash": bash, "_lionwt": zsh, "lionwt.fish": fish}


def main(arguments: list[str]) -> int:
    """Write the three scripts into a directory."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m lionwt.completion DIRECTORY\n")
        return 2
    directory = Path(arguments[0])
    directory.mkdir(parents=True, exist_ok=True)
    for name, script in SCRIPTS.items():
        (directory / name).write_text(script(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

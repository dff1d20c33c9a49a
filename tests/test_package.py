"""The shape of the house: who imports whom, what a start costs, what a wheel holds, what is public."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

import lionwt
from lionwt import records
from tests.conftest import LIONWT, Repo, World

SOURCE = Path(lionwt.__file__).parent
PROJECT = Path(__file__).parent.parent

#: From the ground up; a module imports only from the floors below its own.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("__init__", "values"),
    (
        "command",
        "errors",
        "faults",
        "files",
        "migrations",
        "paths",
        "signals",
        "together",
        "trees",
        "turn",
        "words",
    ),
    ("lionagi", "lionagi.lifecycle", "lionagi.seams"),
    ("lionagi.hosts",),
    ("lionagi.routes",),
    ("lionagi.hooks",),
    ("lionagi.turns",),
    ("answers", "aside", "git", "names", "records", "postgresql"),
    ("database",),
    ("readmodel",),
    ("store", "processes", "repository", "mounts", "contracts", "listing", "walk"),
    ("registration",),
    ("branches", "locks", "parsing", "parameters", "places", "snapshot", "history"),
    ("worktree",),
    ("capture", "session"),
    ("runs", "repair"),
    ("evidence", "submodules", "checks", "trash", "sweep", "start", "status", "opening"),
    ("checkout", "late", "allocation"),
    ("indexlock", "teardown", "versions"),
    ("obstacles",),
    ("forward",),
    ("findings", "freeze", "landing", "lease"),
    ("settle", "gone"),
    ("promote",),
    ("reconcile",),
    ("reap",),
    ("coordinator", "reports", "lionagi.launch"),
    ("lionagi.leases",),
    ("lionagi.providers", "lionagi.tools"),
    ("lionagi.worker_seams", "lionagi.beforehand"),
    ("lionagi.workers",),
    ("cli",),
    ("__main__", "completion"),
)
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}

#: Who may import what from outside, where it is not everybody's.
ONLY_IN = {
    "typer": {"cli", "completion", "parameters"},
    "rich": {"answers"},
    "filelock": {"locks"},
    "msgspec": {"records", "values"},
    "pydantic": {"contracts"},
    "psutil": {"processes"},
    "sqlite3": {"database"},
    "psycopg": {"database", "postgresql"},
    "subprocess": {"git", "checks", "lionagi.leases"},
    "shlex": {"lionagi.leases", "words"},
    "asyncio": {"coordinator", "lionagi.hosts", "lionagi.leases", "turn"},
}
#: What starts a process without subprocess.
STARTERS = re.compile(r"(system|popen|fork|forkpty|posix_spawnp?|spawn[lv]p?e?|exec[lv]p?e?|create_subprocess_.*)")


def modules() -> dict[str, ast.Module]:
    """Every module of the package, parsed, by its name below ``lionwt``."""
    return {name_of(path): ast.parse(path.read_text("utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def name_of(path: Path) -> str:
    """``lionagi.turns`` of a file; of a package's own file, that package."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imports(tree: ast.Module) -> Iterator[str]:
    """Every imported module, at any depth, by its full name; not what only type checkers import."""
    checked_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in checked_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "imports are absolute"
            if node.module in ("lionwt", "lionwt.lionagi"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def test_every_module_has_its_place_in_the_table() -> None:
    """House style: each room has one purpose; a new one is put where it belongs."""
    assert set(modules()) == set(FLOOR_OF)


@pytest.mark.parametrize("name", sorted(FLOOR_OF))
def test_imports_go_one_way(name: str) -> None:
    """House style: cli → verbs → worktree, store, locks, processes → git → records, names → errors."""
    for imported in imports(modules()[name]):
        package, _, rest = imported.partition(".")
        if package == "lionwt" and rest != "__version__":
            inner = rest if rest in FLOOR_OF else rest.split(".")[0] or "__init__"
            assert FLOOR_OF[inner] < FLOOR_OF[name], f"{name} imports {inner}"
        elif package in ONLY_IN:
            assert name in ONLY_IN[package], f"{name} imports {package}"


def test_processes_are_started_by_the_git_module_alone() -> None:
    """Design 6: one module starts git."""
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in ("os", "asyncio", "pty"):
                # lionwt li becomes lionagi's li.
                assert not STARTERS.fullmatch(node.attr) or name == "lionagi.launch", f"{name}:{node.lineno}"


def test_every_recursive_removal_looks_for_mounts_first() -> None:
    """Invariant 16: one function removes trees, and it never walks into a mount or through a link."""
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("rmtree", "removedirs"):
                assert name == "mounts", f"{name}:{node.lineno}"


def test_nothing_but_answers_prints() -> None:
    """Design 5: what reaches a terminal is escaped, in one place; --version and help are constant texts."""
    for name, tree in modules().items():
        if name in ("answers", "completion"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print":
                assert ast.unparse(node).startswith("print(f'lionwt {__version__}'"), f"{name}:{node.lineno}"
            if isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr") and name != "lionagi.launch":
                assert getattr(node.value, "id", None) != "sys", f"{name}:{node.lineno}"


# Start-up


def imported_by(world: World, *arguments: str, code: int = 0) -> set[str]:
    """The modules that a command line imports, as the interpreter reports them."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", LIONWT, *arguments],
        cwd=world.root,
        env=world.environment({"NO_COLOR": None}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done
    rows = re.findall(r"^import time: .*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert "lionwt.__main__" in rows
    return set(rows) | {row.split(".")[0] for row in rows}


HEAVY = {"typer", "pydantic", "rich", "filelock", "psutil", "asyncio", "subprocess", "sqlite3"}


def test_importing_the_package_imports_nothing_else() -> None:
    """House style: the public names are resolved lazily."""
    script = "import sys; before = set(sys.modules); import lionwt; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert set(ast.literal_eval(done.stdout)) - {"__future__"} == {"lionwt"}


def test_the_version_is_answered_before_typer_is_imported(world: World) -> None:
    """Design 11: --version answers before typer is imported."""
    found = imported_by(world, "--version")
    assert not found & HEAVY
    assert {name for name in found if name.startswith("lionwt.")} == {"lionwt.__main__"}


def test_help_imports_the_parser_and_nothing_heavy(world: World) -> None:
    """Design 11: rich, filelock, psutil, pydantic only where used."""
    assert imported_by(world, "--help") & (HEAVY - {"subprocess"}) == {"typer"}


def test_no_command_imports_pydantic(world: World, repo: Repo) -> None:
    """Design 11: pydantic is for whoever imports the contracts; every parameter of a command does without it."""
    opening = ("--repo", str(repo.path), "--target", "work", "--policy", "merge_validated")
    found = imported_by(world, "lease", "r1", "-w", "w1", *opening)
    for verb in (["start", "r1", "w1"], ["freeze", "r1", "w1", "--succeeded"], ["promote", "r1"], ["status", "r1"]):
        found |= imported_by(world, *verb)
    assert not found & {"pydantic", "pydantic_core", "typer._adapters"}


def test_the_contracts_and_what_the_commands_work_on_have_the_same_fields() -> None:
    """Design 2: the contracts are exactly the ADR's; a lease file holds the same."""
    pairs = {
        "WorkspacePolicy": "Policy",
        "WorkerWorktreeLease": "Lease",
        "WorkerPathBinding": "Binding",
        "ValidationResult": "Validation",
        "WorkerCandidate": "Candidate",
        "WorkerWorktreeRecord": "Record",
    }
    for public, kept in pairs.items():
        contract, data = getattr(lionwt, public), getattr(records, kept)
        assert tuple(contract.model_fields) == data.__struct_fields__, public
        for field in msgspec.structs.fields(data):
            stated = contract.model_fields[field.name]
            assert stated.is_required() is field.required, (public, field.name)
            assert field.required or stated.default == field.default, (public, field.name)


def test_a_command_imports_only_what_it_uses(world: World, repo: Repo) -> None:
    """Design 11: a refusal takes no lock and paints nothing; start looks at no process."""
    assert not imported_by(world, "promote", "r1", code=3) & {"rich", "filelock", "asyncio", "sqlite3"}
    world.lease("r1", "w1", start=False)
    assert not imported_by(world, "start", "r1", "w1") & {"rich", "psutil", "psycopg"}


# The wheel


def test_a_wheel_holds_the_package_its_types_and_the_completions(tmp_path: Path) -> None:
    """Design 5: completions for bash, zsh and fish come with the package; the tests do not."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=PROJECT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        stem = f"lionwt-{lionwt.__version__}"
        assert {name.split("/")[0] for name in names} == {"lionwt", f"{stem}.dist-info", f"{stem}.data"}
        assert {f"lionwt/{path.relative_to(SOURCE)}" for path in SOURCE.rglob("*.py")} | {"lionwt/py.typed"} <= names
        for source, installed in [
            ("lionwt.bash", "bash-completion/completions/lionwt"),
            ("_lionwt", "zsh/site-functions/_lionwt"),
            ("lionwt.fish", "fish/vendor_completions.d/lionwt.fish"),
        ]:
            content = archive.read(f"{stem}.data/data/share/{installed}")
            assert content == (PROJECT / "completions" / source).read_bytes()
        points = archive.read(f"{stem}.dist-info/entry_points.txt").decode()
        assert points == "[console_scripts]\nlionwt = lionwt.__main__:main\n"
        assert f"{stem}.dist-info/licenses/LICENSE" in names


# What is public


def test_every_public_name_is_there_and_no_other() -> None:
    """Design 2: the models and the port are public: from lionwt import WorkspacePolicy."""
    assert dir(lionwt) == sorted(lionwt.__all__)
    for name in lionwt.__all__:
        assert getattr(lionwt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Workspace'"):
        _ = lionwt.Workspace


def public_members() -> Iterator[tuple[str, object]]:
    for name in lionwt.__all__:
        found = getattr(lionwt, name)
        if inspect.isclass(found) and found.__module__.startswith("lionwt."):
            yield name, found
            for member, value in vars(found).items():
                if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    yield f"{name}.{member}", value


def test_every_public_name_is_documented() -> None:
    """Design 2: public and documented."""
    undocumented = [name for name, found in public_members() if not inspect.getdoc(found)]
    assert not undocumented


def test_every_module_says_what_it_guarantees() -> None:
    """House style: a module's docstring says what it guarantees."""
    for name, tree in modules().items():
        assert ast.get_docstring(tree), name


def test_a_command_to_type_is_quoted_by_the_one_helper() -> None:
    """What a worker, or the operator's own directory, is called must not become words of a command."""
    begun = re.compile(r"(?:\bgit (?:-|config |worktree |branch |switch )|(?:^|[ (])(?:rm|mv|umount|cd) )[^;:]*$")
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                for before, after in pairwise(node.values):
                    if isinstance(before, ast.Constant) and isinstance(after, ast.FormattedValue):
                        assert not begun.search(str(before.value)), f"{name}:{node.lineno}: {ast.unparse(node)}"

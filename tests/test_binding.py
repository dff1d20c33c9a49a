"""``WorkerPathBinding.resolve``: a worker's path is under its own roots, or refused (ADR-0091 D2)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lionwt import LionwtError, WorkerPathBinding


@pytest.fixture
def binding(tmp_path: Path) -> WorkerPathBinding:
    """Two workers' roots beside each other, with every trap that a worker can lay for itself."""
    for worker in ("w1", "w2"):
        (tmp_path / "trees" / worker / "sub/deep").mkdir(parents=True)
        (tmp_path / "artifacts" / worker / "out").mkdir(parents=True)
        (tmp_path / "trees" / worker / "sub/file").write_text(worker)
        (tmp_path / "trees" / worker / ".git").write_text("gitdir: elsewhere\n")
        (tmp_path / "artifacts" / worker / "out/report").write_text(worker)
    tree = tmp_path / "trees/w1"
    (tree / "to-file").symlink_to(tree / "sub/file")
    (tree / "to-dir").symlink_to("sub")
    (tree / "sub/to-sibling").symlink_to("../../w2")
    (tree / "sub/deep/dangling").symlink_to("/nonexistent")
    (tree / "sub/loop").symlink_to("loop")
    (tmp_path / "artifacts/w1/out/link").symlink_to("/etc")
    return WorkerPathBinding(
        cwd=tree,
        provider_repo=tree,
        source_roots=(tree,),
        writable_artifact_root=tmp_path / "artifacts/w1",
        env={},
    )


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("sub/file", "trees/w1/sub/file"),
        ("./sub//file", "trees/w1/sub/file"),
        ("new", "trees/w1/new"),
        ("new/dir/file", "trees/w1/new/dir/file"),
        ("sub/deep/new", "trees/w1/sub/deep/new"),
        ("out/report", "artifacts/w1/out/report"),
        ("out/new", "trees/w1/out/new"),
        (".", "trees/w1"),
        (".gitignore", "trees/w1/.gitignore"),
        (".github/workflows/x", "trees/w1/.github/workflows/x"),
        ("a..b/..c", "trees/w1/a..b/..c"),
        ("~/x", "trees/w1/~/x"),
        ("-rf", "trees/w1/-rf"),
        (Path("sub/file"), "trees/w1/sub/file"),
        (os.fsdecode(b"odd\xff\n"), os.fsdecode(b"trees/w1/odd\xff\n")),
    ],
    ids=repr,
)
def test_a_path_inside_resolves_to_a_real_one(
    binding: WorkerPathBinding, tmp_path: Path, given: str | Path, found: str
) -> None:
    """ADR-0091 D2: resolve relative paths under the worktree or artifact root."""
    resolved = binding.resolve(given)
    assert resolved == tmp_path / found
    assert os.path.realpath(resolved) == str(resolved)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "..",
        "../w2/sub/file",
        "sub/../file",
        "sub/..",
        "new/../../w2",
        "/",
        "/etc/passwd",
        "//etc/passwd",
        "nul\0",
        "to-file",
        "to-dir",
        "to-dir/file",
        "to-dir/new",
        "sub/to-sibling",
        "sub/to-sibling/sub/file",
        "sub/deep/dangling",
        "sub/deep/dangling/new",
        "sub/loop",
        "sub/loop/x",
        "out/link",
        "out/link/passwd",
        ".git",
        "./.git",
        ".GIT/config",
        ".Git",
        "sub/.git/hooks/pre-commit",
        "new/.gIt",
    ],
    ids=repr,
)
def test_a_path_that_could_lead_out_is_refused(binding: WorkerPathBinding, given: str) -> None:
    """ADR-0091 D2: reject escapes; design section 7: ``..``, absolute, symlink at any level, ``.git``."""
    with pytest.raises(LionwtError) as refused:
        binding.resolve(given)
    assert (refused.value.code, refused.value.exit_code) == ("path_escape", 3)


def test_the_absolute_path_of_a_sibling_or_of_its_own_is_refused(binding: WorkerPathBinding, tmp_path: Path) -> None:
    """ADR-0091 D2: a prompt mentioning the host checkout does not create a path grant."""
    for path in (tmp_path / "trees/w2/sub/file", binding.cwd / "sub/file", tmp_path / "artifacts/w2/out/report"):
        with pytest.raises(LionwtError):
            binding.resolve(path)


@pytest.mark.parametrize("replaced", ["trees/w1", "trees", "artifacts/w1", "artifacts"])
def test_a_root_that_is_reached_through_a_link_by_now_is_refused(
    binding: WorkerPathBinding, tmp_path: Path, replaced: str
) -> None:
    """Design section 7: a real path under the worktree or the artifact root, or it raises; at any level."""
    place = tmp_path / replaced
    place.rename(tmp_path / "aside")
    place.symlink_to(tmp_path / "aside")
    with pytest.raises(LionwtError) as refused:
        binding.resolve("sub/file")
    assert refused.value.code == "path_escape"


def test_a_binding_is_frozen_and_takes_nothing_extra(binding: WorkerPathBinding) -> None:
    """ADR-0091 D2: the contract is frozen, extra forbidden."""
    from pydantic import ValidationError

    with pytest.raises(ValidationError):
        binding.cwd = Path("/")  # type: ignore[misc]
    with pytest.raises(ValidationError):
        WorkerPathBinding.model_validate({**binding.model_dump(), "add_dir": ()})

"""A source folder becomes the same bytes everywhere, without what does not belong."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from spotkeeper.client import pack as pack_module
from spotkeeper.client.errors import CliError
from spotkeeper.client.pack import LIMIT_BYTES, pack
from spotkeeper_agent.job.source import extract


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(tar: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return archive.getnames()


def test_same_content_same_hash(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, order in ((one, ("b", "a")), (two, ("a", "b"))):
        for name in order:
            write(folder, **{f"{name}_dot_py": name, f"sub__{name}_dot_txt": name})
    os.utime(two / "a.py", (1, 1))
    assert pack(one).sha256 == pack(two).sha256
    (two / "a.py").write_text("A")
    assert pack(one).sha256 != pack(two).sha256


def test_the_executable_bit_is_content_and_other_modes_are_not(tmp_path: Path) -> None:
    write(tmp_path, a_dot_sh="x")
    plain = pack(tmp_path).sha256
    (tmp_path / "a.sh").chmod(0o600)
    assert pack(tmp_path).sha256 == plain
    (tmp_path / "a.sh").chmod(0o700)
    assert pack(tmp_path).sha256 != plain


def test_ignored_files_are_not_packed(tmp_path: Path) -> None:
    write(tmp_path, a_dot_py="x", data__big_dot_bin="x", data__keep_dot_txt="x", sub__b_dot_log="x", sub__c_dot_py="x")
    write(tmp_path, _dot_git__HEAD="x", sub____pycache______x_dot_pyc="x", _dot_venv__bin__python="x")
    (tmp_path / ".gitignore").write_text("data/*\n!data/keep.txt\n")
    (tmp_path / "sub" / ".gitignore").write_text("*.log\n")
    found = names(pack(tmp_path).tar)
    assert found == [".gitignore", "a.py", "data/keep.txt", "sub/.gitignore", "sub/c.py"]


def test_a_pipelines_credentials_are_never_packed(tmp_path: Path) -> None:
    """google-github-actions/auth leaves them in the checkout, under a name that is another each time."""
    (tmp_path / "train.py").write_text("x")
    before = pack(tmp_path).sha256
    (tmp_path / ".spotkeeperignore").write_text("!gha-creds-*.json\n.spotkeeperignore\n")
    (tmp_path / "gha-creds-0123456789abcdef.json").write_text("{}")
    assert pack(tmp_path).sha256 == before


def test_spotkeeperignore_replaces_gitignore(tmp_path: Path) -> None:
    write(tmp_path, a_dot_py="x", weights_dot_bin="x")
    (tmp_path / ".gitignore").write_text("weights.bin\n")
    (tmp_path / ".spotkeeperignore").write_text(".*\n")
    assert names(pack(tmp_path).tar) == ["a.py", "weights.bin"]


def test_a_too_large_folder_names_its_largest_files(tmp_path: Path) -> None:
    write(tmp_path, a_dot_py="x", big_dot_bin="y" * 3000, mid_dot_bin="z" * 1000)
    with pytest.raises(CliError) as caught:
        pack(tmp_path, limit_bytes=2000)
    page = Path(__file__).resolve().parents[2] / "docs" / "train.md"
    assert f"({LIMIT_BYTES / 1e6:g} MB;" in page.read_text(), "one unit in the page and the error"
    assert "largest: big.bin (0.0 MB), mid.bin (0.0 MB), a.py (0.0 MB)" in str(caught.value)
    assert "spotkeeperignore" in caught.value.remedy


def test_links_inside_are_kept_and_links_outside_refused(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    write(inside, a_dot_py="x", sub__b_dot_py="x")
    (inside / "link.py").symlink_to("a.py")
    (inside / "there").symlink_to("sub", target_is_directory=True)
    assert names(pack(inside).tar) == ["a.py", "link.py", "sub/b.py", "there"]
    (inside / "out").symlink_to(tmp_path)
    with pytest.raises(CliError, match=r"out is a link to .* outside the folder"):
        pack(inside)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    with pytest.raises(CliError, match="the ignore rules leave no file to send"):
        pack(tmp_path)


def test_pipes_and_sockets_are_not_packed(tmp_path: Path) -> None:
    write(tmp_path, a_dot_py="x")
    os.mkfifo(tmp_path / "pipe")
    assert names(pack(tmp_path).tar) == ["a.py"]


def test_an_agent_can_unpack_it(tmp_path: Path) -> None:
    source = tmp_path / "in"
    write(source, a_dot_py="x", sub__b_dot_py="y")
    (source / "sub" / "up.py").symlink_to("../a.py")
    with tarfile.open(fileobj=io.BytesIO(pack(source).tar)) as tar:
        extract(tar, tmp_path / "out")
    assert (tmp_path / "out" / "sub" / "up.py").read_text() == "x"


@pytest.mark.parametrize("rule", ["!", "\\"])
def test_an_invalid_ignore_rule_is_named_with_its_line(tmp_path: Path, rule: str) -> None:
    write(tmp_path, a_dot_py="x")
    (tmp_path / ".gitignore").write_text(f"*.log\n{rule}\n")
    with pytest.raises(CliError, match=r"\.gitignore:2: .* is not a valid ignore rule"):
        pack(tmp_path)


def test_a_link_that_leads_back_to_itself_is_refused(tmp_path: Path) -> None:
    write(tmp_path, a_dot_py="x")
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    try:
        (tmp_path / "one").resolve()
    except RuntimeError:  # Python before 3.13; later ones take it for a link to nothing
        with pytest.raises(CliError, match="one is a link to two, which leads back to the link"):
            pack(tmp_path)


def test_a_file_that_vanishes_during_packing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, a_dot_py="x", b_dot_py="x")
    sizes = pack_module._check_size

    def goes(folder: Path, found: list[str], limit_bytes: int) -> None:
        (folder / "b.py").unlink(missing_ok=True)
        sizes(folder, found, limit_bytes)

    monkeypatch.setattr(pack_module, "_check_size", goes)
    with pytest.raises(CliError, match=r"b\.py: cannot be read: No such file") as caught:
        pack(tmp_path)
    assert "submit again" in caught.value.remedy


def test_an_unreadable_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, a_dot_py="x", sub__b_dot_py="x")
    scan = os.scandir

    def refuse(path: str) -> object:
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read everything, so the kernel would not refuse
    with pytest.raises(CliError, match=r"sub: cannot be read: Permission denied"):
        pack(tmp_path)


def test_the_git_file_of_a_worktree_is_not_packed(tmp_path: Path) -> None:
    write(tmp_path, a_dot_py="x", _dot_git="gitdir: elsewhere", sub___dot_git="gitdir: elsewhere")
    assert names(pack(tmp_path).tar) == ["a.py"]

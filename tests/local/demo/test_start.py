"""The demo before it trains: bad arguments, folders that it may not delete, and clouds that do not start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotkeeper.local.core import procs
from spotkeeper.local.demo import __main__ as demo
from spotkeeper.local.lifecycle import cloud

Out = pytest.CaptureFixture[str]


def said(out: Out) -> str:
    return " ".join(out.readouterr().out.split())


@pytest.fixture(autouse=True)
def _signals_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.StopSignal, "listen", lambda _: None)


@pytest.mark.parametrize("name", ["home", "[/b]"])
def test_a_folder_with_other_files_is_refused_and_stays(tmp_path: Path, capsys: Out, name: str) -> None:
    """`make demo ARGS=--folder=$HOME` deleted that folder, and ended a cloud that was not the demo's."""
    folder = tmp_path / name
    (folder / "cloud").mkdir(parents=True)
    (folder / "cloud" / "cloud.json").write_text("another cloud")
    assert demo.main(["--folder", str(folder)]) == 2
    assert (folder / "cloud" / "cloud.json").read_text() == "another cloud"
    assert not list(tmp_path.rglob("*.lock"))
    text = said(capsys)
    assert f"--folder {folder}: the folder has files" in text and "ARGS=--folder=.spotkeeper/second" in text


def test_a_file_is_no_folder_for_the_demo(tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "file").touch()
    assert demo.main(["--folder", str(tmp_path / "file")]) == 2
    assert f"--folder {tmp_path / 'file'}: this is not a folder: use another folder" in said(capsys)


def test_only_an_earlier_demos_files_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "kept").touch()
    folder = tmp_path / "new" / "demo"
    for _ in range(2):
        demo.clear(folder)
        assert [path.name for path in folder.iterdir()] == [demo.MARKER]
        (folder / "cloud" / "vms").mkdir(parents=True)
        (folder / "report.json").touch()
        (folder / "link").symlink_to(tmp_path / "else")
    assert (tmp_path / "else" / "kept").exists()


@pytest.mark.parametrize(
    "words",
    [
        *("--scale=0", "--scale=-1", "--scale=nan", "--scale=1e9", "--scale=fast"),
        *("--steps=0", "--steps=-5", "--steps=\u00b2", "--seed=-1", "--seed=" + "9" * 5000),
    ],
)
def test_a_bad_number_is_refused_with_its_option_and_value(capsys: Out, words: str) -> None:
    option, _, value = words.partition("=")
    with pytest.raises(SystemExit, match="2"):
        demo.main([words])
    error = capsys.readouterr().err
    assert f"argument {option}: {value!r} is not a " in error and "Traceback" not in error


def test_a_cloud_that_does_not_start_is_an_error_and_leaves_nothing(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "UP_S", 0.0)
    before = procs.living()
    assert demo.main(["--folder", str(tmp_path / "demo"), "--engine", "in-process"]) == 1
    assert "the demo failed:" in (text := said(capsys)) and "the control plane does not answer after 0 s" in text
    assert not (tmp_path / "demo" / "cloud").exists()
    assert not [pid for pid in set(procs.living()) - set(before) if str(tmp_path) in " ".join(procs.arguments(pid))]


@pytest.mark.parametrize("content", [b"{", None])
def test_a_demo_whose_cloud_is_damaged_is_cleaned_up(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    folder = tmp_path / "demo"
    demo.clear(folder)
    (folder / "cloud").mkdir()
    if content is not None:
        (folder / "cloud" / "cloud.json").write_bytes(content)
    monkeypatch.setattr(cloud, "UP_S", 0.0)
    assert demo.main(["--folder", str(folder), "--engine", "in-process"]) == 1
    assert "the control plane does not answer" in said(capsys), "the damaged cloud is gone"
    assert not (folder / "cloud").exists()


def test_what_cannot_be_removed_is_an_error(tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    demo.clear(tmp_path)

    def refuse(_: Path) -> None:
        raise PermissionError(13, os.strerror(13), str(tmp_path / "cloud"))

    monkeypatch.setattr(demo.shutil, "rmtree", refuse)
    (tmp_path / "cloud").mkdir()
    assert demo.main(["--folder", str(tmp_path)]) == 1
    assert f"the demo failed: [Errno 13] Permission denied: '{tmp_path / 'cloud'}'" in said(capsys)

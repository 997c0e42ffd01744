"""A private copy of the tree with an environment of its own, and the worker that runs tests there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class Lane:
    """One worker. Not for several threads at once."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self._process: subprocess.Popen[bytes] | None = None
        copy_tree(root, folder)
        _environment(root, folder)

    def start(self, files: list[str], *, record: bool) -> Json:
        """Collect the tests of these files."""
        self.stop()
        requests, ours = os.pipe()
        theirs, answers = os.pipe()
        self._requests, self._answers = os.fdopen(ours, "w"), os.fdopen(theirs)
        command = [".venv/bin/python", "-m", "tests.mutants.worker", str(requests), str(answers)]
        with (self.folder / ".log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "record" if record else "run", *files],
                cwd=self.folder,
                pass_fds=(requests, answers),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        os.close(requests)
        os.close(answers)
        return self._read()

    def ask(self, request: Json) -> Json:
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return self._read()

    def _read(self) -> Json:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the worker ended:\n{(self.folder / '.log').read_text()[-3000:]}")
        answer: Json = json.loads(line)
        return answer

    def kill(self) -> None:
        """End the worker and all that descends from it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        self.stop()

    def stop(self) -> None:
        if self._process is not None:
            self._requests.close()
            self._process.wait()
            self._answers.close()
            self._process = None


def copy_tree(root: Path, folder: Path) -> None:
    """Copy what git tracks or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name, follow_symlinks=False)


def _environment(root: Path, folder: Path) -> None:
    """Link the packages of ``.venv``; only what names the checkout is another."""
    old, new = root / ".venv", folder / ".venv"
    packages = next(old.glob("lib/python*/site-packages")).relative_to(old)
    (new / packages).mkdir(parents=True)
    (new / "bin").mkdir()
    for path in [old / "pyvenv.cfg", *(old / "bin").iterdir(), *(old / packages).iterdir()]:
        to = new / path.relative_to(old)
        if path.is_symlink():
            to.symlink_to(path.readlink())
        elif (path.is_file() and path.parent.name == "bin" and _named(path, root)) or path.name.startswith("__edit"):
            # With another checkout's, tests would import that one and meet no mutant.
            if path.name.endswith("_finder.py") and f"'{root}/" not in path.read_text():
                raise RuntimeError(f"{old} is another checkout's: remove it and run `make setup` in {root}")
            to.write_text(path.read_text().replace(str(root), str(folder)))
            to.chmod(path.stat().st_mode)
        elif path.name != "__pycache__":
            to.symlink_to(path)


def _named(path: Path, root: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!" and str(root).encode() in file.read(4096)

"""Runs every benchmark below this folder, prints one table, writes ``bench/results.json``.

A benchmark is a module with ``figures() -> list[dict]``; a figure has ``name``, ``value``, ``unit``, ``goal`` (a text
such as ``<= 35``), ``holds`` and ``against`` (the comparison). A benchmark that fails is a figure that does not hold.

    make bench                       all of them
    make bench ARGS="agent round"    some

``train/`` the library, ``job/`` agents and launchers, ``market/`` the choice of machines, ``service/`` function,
command and infrastructure.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
KEYS = ("name", "value", "unit", "goal", "holds", "against")
Figure = dict[str, object]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure what Spotkeeper promises.")
    parser.add_argument("only", nargs="*", help=f"some of {', '.join(benchmarks())}; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.only) - set(benchmarks()))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)} (there are {', '.join(benchmarks())})")
    sys.path.insert(0, str(HERE.parent))  # benchmarks import each other as `bench.<folder>.<name>`
    figures = [figure for name in options.only or benchmarks() for figure in run(name)]
    if options.only:
        figures = merged(known(options.out), figures)
    options.out.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n")
    print(table(figures))
    return 1 if any(figure["holds"] is False for figure in figures) else 0


def benchmarks() -> dict[str, Path]:
    """The modules with figures, by name."""
    found = (path for path in HERE.rglob("*.py") if path.stem != "run" and path.stem[0] != "_")
    return {
        path.stem: path
        for path in sorted(found, key=lambda path: path.stem)
        if "def figures(" in path.read_text("utf-8")
    }


def run(name: str) -> list[Figure]:
    """Return the figures of one benchmark, each checked to be complete."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    try:
        figures = [checked(name, figure) for figure in load(name).figures()]
    except Exception as error:
        traceback.print_exc()
        return [failed(name, f"{type(error).__name__}: {error}")]
    print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return figures or [failed(name, "no figures")]


def load(name: str) -> ModuleType:
    path = benchmarks()[name]
    spec = importlib.util.spec_from_file_location(".".join(("bench", *path.relative_to(HERE).parts))[:-3], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def checked(name: str, figure: Figure) -> Figure:
    missing = [key for key in KEYS if key not in figure]
    if missing:
        raise ValueError(f"{name}.py: the figure {figure.get('name', '?')} lacks {', '.join(missing)}")
    if not isinstance(figure["holds"], bool if figure["value"] is not None else type(None)):
        raise TypeError(f"{name}.py: {figure['name']}: `holds` must be true or false, or None without a value")
    return {key: figure[key] for key in KEYS}


def failed(name: str, why: str) -> Figure:
    return {"name": name, "value": None, "unit": "", "goal": "runs", "holds": False, "against": why}


def known(path: Path) -> list[Figure]:
    """Return the figures of an earlier run: measuring one benchmark keeps the others'."""
    try:
        found: list[Figure] = json.loads(path.read_text())["figures"]
    except (OSError, ValueError, KeyError):
        return []
    return found


def merged(old: list[Figure], new: list[Figure]) -> list[Figure]:
    names = {figure["name"] for figure in new}
    return sorted([f for f in old if f["name"] not in names] + new, key=lambda figure: str(figure["name"]))


def machine() -> str:
    """Describe the machine without naming it."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    # Distributions build Python with profile-guided optimization, version managers mostly do not: up to a fifth slower.
    whose = " of the distribution" if sys.base_prefix == "/usr" else ""
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, {memory_gb:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}{whose}, load {os.getloadavg()[0]:.1f}"
    )


def table(figures: list[Figure]) -> str:
    rows = [("figure", "value", "goal", "", "against")]
    for figure in figures:
        value = figure["value"]
        shown = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        holds = "not measured" if figure["holds"] is None else "holds" if figure["holds"] else "MISSED"
        rows.append(
            (
                str(figure["name"]),
                f"{shown} {figure['unit']}".strip(),
                str(figure["goal"]),
                holds,
                str(figure["against"]),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())

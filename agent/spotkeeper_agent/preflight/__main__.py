"""``python -m spotkeeper_agent.preflight``: checks this machine; prints text or JSON."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from spotkeeper_agent.preflight import all_checks, boot_checks, here
from spotkeeper_agent.preflight.findings import Finding, Level, Report, examine


def main(argv: list[str]) -> int:
    """Print findings as they come; return 1 if one of them is an error."""
    parser = argparse.ArgumentParser(
        prog="spotkeeper_agent.preflight", description="Check whether this machine is fit to train."
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where checkpoints go")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="ADDRESS", help="a machine that must be reachable"
    )
    parser.add_argument("--notice", type=float, metavar="SECONDS", help="length of a preemption notice")
    parser.add_argument("--python", default="python3", metavar="PROGRAM", help="the interpreter that runs the job")
    parser.add_argument("--quick", action="store_true", help="only the checks that run at every boot")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    asked = parser.parse_args(argv)
    machine = here(asked.folder, tuple(asked.peer), asked.notice, asked.python)
    findings: list[Finding] = []
    for one in examine(boot_checks() if asked.quick else all_checks(), machine):
        findings.append(one)
        if not asked.json:
            remedy = f"\n{'':23} do: {one.remedy}" if one.remedy else ""
            print(f"{one.check:13} {one.level.value:8} {one.found}{remedy}", flush=True)
    report = Report.of(findings)
    if asked.json:
        print(msgspec.json.encode(report).decode())
    return 1 if report.level is Level.ERROR else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Where things are in the bucket: one function per name, and nobody else spells a path.

What comes from outside (job ids, names, boots) is checked here, so no path can leave its folder.
"""

from __future__ import annotations

import re

from spotkeeper.reconcile.objects import BadKeyError
from spotkeeper.spec import mirror
from spotkeeper.spec.facts import Fact
from spotkeeper.spec.names import JOB_ID, JOB_NAME

STACK = "stack/pools.json"
ALLOC = "stack/alloc"
DRAIN = "stack/drain"
ACTIVE = "active/"
STATIC = "static/"
MARKET = "market/"
QUARANTINE = "quarantine/"

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_WORD = re.compile(r"[-a-z0-9]{1,64}\Z")
_NOT_PLAIN = re.compile(r"[^-A-Za-z0-9_]+")


def _job(job: str) -> str:
    if not JOB_ID.match(job):
        raise BadKeyError(f"{job[:40]!r} is not a job id (8 characters of a-z and 0-9)")
    return job


def _word(text: str) -> str:
    if not _WORD.match(text):
        raise BadKeyError(f"{text[:80]!r} cannot be part of a name in the bucket ([-a-z0-9], at most 64)")
    return text


def _sha(digest: str) -> str:
    if not _SHA256.match(digest):
        raise BadKeyError(f"{digest[:80]!r} is not a SHA-256 in lower-case hex")
    return digest


def bundle(sha256: str) -> str:
    return f"bundles/{_sha(sha256)}.tar"


def active(job: str) -> str:
    return ACTIVE + _job(job)


def name(job_name: str) -> str:
    if not JOB_NAME.match(job_name):
        raise BadKeyError(f"{job_name[:80]!r} is not a job name ([a-z][-a-z0-9]*, at most 40)")
    return f"names/{job_name}"


def folder(job: str) -> str:
    return f"jobs/{_job(job)}/"


def spec(job: str, sha256: str = "") -> str:
    """The job file as submitted; with a hash, one that replaced it (``Record.spec_key``)."""
    return folder(job) + (f"spec-{_sha(sha256)}.json" if sha256 else "spec.json")


def sources(job: str) -> str:
    return folder(job) + "source/"


def source(job: str, sha256: str) -> str:
    """The job's source tar; ``jobs/<job>/source/<sha256>`` as ``JobRun.source_sha256`` says."""
    return sources(job) + _sha(sha256)


def record(job: str) -> str:
    return folder(job) + "rec"


def lease(job: str) -> str:
    return folder(job) + "lease"


def facts(job: str) -> str:
    return folder(job) + "facts/"


def fact(job: str, what: Fact) -> str:
    if Fact.parse(what.key()) != what:
        raise BadKeyError(f"{what!r} does not survive as a key")
    return facts(job) + what.key()


def asks(job: str) -> str:
    return folder(job) + "ask/"


def ask(job: str, ask_id: str) -> str:
    return asks(job) + _word(ask_id)


def progress(job: str) -> str:
    return folder(job) + "progress"


def ledger(job: str) -> str:
    return folder(job) + "ledger/"


def entry(job: str, at: float, entry_id: str) -> str:
    """Milliseconds, zero-padded, so that names sort by time; dots only between time and id."""
    return ledger(job) + f"{max(0, round(at * 1000)):016d}.{_NOT_PLAIN.sub('-', entry_id)[:200]}"


def log(job: str, rank: int, gen: int) -> str:
    return folder(job) + f"logs/{rank}/{gen}.log"


def outputs(job: str) -> str:
    """What the job left: of each rank its list (``spec.output``), and its files in a folder beside it."""
    return folder(job) + "out/"


def output_list(job: str, rank: int) -> str:
    return outputs(job) + f"{rank}.json"


def output_file(job: str, rank: int, file: str) -> str:
    return outputs(job) + f"{rank}/{file}"


def copies(job: str) -> str:
    """Copies of checkpoints (``spec.mirror``)."""
    return mirror.folder(_job(job))


def copy_of(path: str) -> str:
    """Of which checkpoint a path below ``copies`` is, as "<gen>-<step>"."""
    return path.split("/")[3]


def static_node(node: str) -> str:
    return f"{STATIC}{_word(node)}/"


def static_hello(node: str, boot: str) -> str:
    return static_node(node) + _word(boot)


def prices(pool: str) -> str:
    return f"{MARKET}prices/{_word(pool)}"


def market_past(pool: str) -> str:
    return f"{MARKET}past/{pool}"


def market_hours(pool: str) -> str:
    return f"{MARKET}hours/{_word(pool)}/"


def market_hour(pool: str, hour: int) -> str:
    """Hours since 1970, zero-padded, so that names sort by time."""
    return market_hours(pool) + f"{max(0, hour):08d}"


def tomb(job: str) -> str:
    return f"tomb/{_job(job)}"


def quarantine(sha256: str) -> str:
    return QUARANTINE + _sha(sha256)

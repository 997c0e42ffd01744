"""The names of objects in the bucket: one function or constant for each; no other module spells a path.

Parts that come from outside (job ids, names, boot ids) are checked here, so no path can leave its folder.
"""

from __future__ import annotations

import re

from spotkeeper.contract import uploads
from spotkeeper.contract.facts import Fact
from spotkeeper.contract.names import JOB_ID, JOB_NAME
from spotkeeper.reconcile.store.objects import BadKeyError

STACK = "stack/pools.json"
ALLOCATION = "stack/allocation"
DRAIN = "stack/drain"
ACTIVE = "active/"
STATIC = "static/"
SWEEPS = "sweeps/"
MARKET = "market/"
NOTIFICATIONS = "notifications/"
QUARANTINE = "quarantine/"
SHELL = ".shell-"  # in the names of ledger entries that people with shells may create

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_WORD = re.compile(r"[-a-z0-9]{1,64}\Z")
_NOT_PLAIN = re.compile(r"[^-A-Za-z0-9_]+")


def _checked(text: str, pattern: re.Pattern[str], want: str) -> str:
    if not pattern.match(text):
        raise BadKeyError(f"{text[:80]!r} {want}")
    return text


def _job(job: str) -> str:
    return _checked(job, JOB_ID, "is not a job id (8 characters of a-z and 0-9)")


def _word(text: str) -> str:
    return _checked(text, _WORD, "cannot be part of a name in the bucket (1 to 64 characters of [-a-z0-9])")


def _sha(digest: str) -> str:
    return _checked(digest, _SHA256, "is not a SHA-256 in lower-case hex")


def bundle(sha256: str) -> str:
    return f"bundles/{_sha(sha256)}.tar"


def active(job: str) -> str:
    return ACTIVE + _job(job)


def name(job_name: str) -> str:
    return "names/" + _checked(job_name, JOB_NAME, "is not a job name ([a-z][-a-z0-9]*, at most 40 characters)")


def folder(job: str) -> str:
    return f"jobs/{_job(job)}/"


def spec(job: str, sha256: str = "") -> str:
    """Return the path of the submitted job file; with a hash, of a file that replaced it (``Record.spec_key``)."""
    return folder(job) + (f"spec-{_sha(sha256)}.json" if sha256 else "spec.json")


def sources(job: str) -> str:
    return folder(job) + "source/"


def source(job: str, sha256: str) -> str:
    """Return the path of the job's source tar with this hash (``JobRun.source_sha256``)."""
    return sources(job) + _sha(sha256)


def record(job: str) -> str:
    return folder(job) + "rec"


def lease(job: str) -> str:
    return folder(job) + "lease"


def facts(job: str) -> str:
    return folder(job) + "facts/"


def fact(job: str, what: Fact) -> str:
    if Fact.parse(what.key()) != what:
        raise BadKeyError(f"{what!r} cannot be encoded as a key")
    return facts(job) + what.key()


def requests(job: str) -> str:
    return folder(job) + "requests/"


def request(job: str, request_id: str) -> str:
    return requests(job) + _word(request_id)


def progress(job: str) -> str:
    return folder(job) + "progress"


def ledger(job: str) -> str:
    return folder(job) + "ledger/"


def by_function(path: str) -> bool:
    """Whether only the function may create this object of a ledger.

    Not so names with ``.shell-``, which people with shells may create, and subfolders, which machines could.
    """
    name = path.partition("/ledger/")[2]
    return "/" not in name and SHELL not in name


def entry(job: str, at: float, entry_id: str) -> str:
    """Return the path of a ledger entry. Its time is zero-padded milliseconds, so that names sort by time."""
    return ledger(job) + f"{max(0, round(at * 1000)):016d}.{_NOT_PLAIN.sub('-', entry_id)[:200]}"


def notification(notification_id: str) -> str:
    return NOTIFICATIONS + _NOT_PLAIN.sub("-", notification_id)[:200]


def study(journal: str) -> str:
    """Return the folder of a journal (``spotkeeper.integrations.journal``), which only submitters' programs write."""
    return f"studies/{_word(journal)}/"


def batch(journal: str, number: int) -> str:
    """Return the path of a batch of a journal's logs; zero-padded, so that names sort by number."""
    return study(journal) + f"batches/{number:08d}"


def segment(journal: str, number: int) -> str:
    """Return the path of a copy of many batches, one after the other."""
    return study(journal) + f"segments/{number:08d}"


def log(job: str, node: int, gen: int) -> str:
    return folder(job) + f"logs/{node}/{gen}.log"


def outputs(job: str) -> str:
    """Return the folder of a job's output. For each node it has a list (``contract.uploads``) and a folder of files."""
    return folder(job) + "out/"


def output_list(job: str, node: int) -> str:
    return outputs(job) + f"{node}.json"


def output_file(job: str, node: int, file: str) -> str:
    return outputs(job) + f"{node}/{file}"


def copies(job: str) -> str:
    """Return the folder of a job's checkpoint copies (``contract.uploads``)."""
    return uploads.mirror_folder(_job(job))


def copy_of(path: str) -> str:
    """Return the checkpoint, "<gen>-<step>", to which a path below ``copies`` belongs."""
    return path.split("/")[3]


def static_machine(machine: str) -> str:
    return f"{STATIC}{_word(machine)}/"


def static_hello(machine: str, boot: str) -> str:
    return static_machine(machine) + _word(boot)


def prices(pool: str) -> str:
    return f"{MARKET}prices/{_word(pool)}"


NETWORKS = f"{MARKET}networks/"


def network(machine_type: str, zone: str) -> str:
    return f"{NETWORKS}{_word(machine_type)}/{_word(zone)}"


def market_past(pool: str) -> str:
    return f"{MARKET}past/{pool}"


def market_hours(pool: str) -> str:
    return f"{MARKET}hours/{_word(pool)}/"


def market_hour(pool: str, hour: int) -> str:
    """Return the path of a pool's observations in one hour, counted from 1970; zero-padded, so names sort by time."""
    return market_hours(pool) + f"{max(0, hour):08d}"


def sweep(name: str) -> str:
    """Return the folder of a search."""
    return SWEEPS + _checked(name, JOB_NAME, "is not a search's name ([a-z][-a-z0-9]*)") + "/"


def sweep_state(name: str) -> str:
    return sweep(name) + "state"


def sweep_spec(name: str) -> str:
    return sweep(name) + "spec.json"


def sweep_cohorts(name: str) -> str:
    return sweep(name) + "cohorts/"


def sweep_cohort(name: str, first: int) -> str:
    """Return the path of the values of a cohort's trials; ``first``: its lowest number."""
    return sweep_cohorts(name) + f"{first:06d}.json"


def sweep_stops(name: str) -> str:
    return sweep(name) + "stops/"


def sweep_stop(name: str, below: int) -> str:
    """Return the path of the object that says that a search's trials with lower numbers were stopped."""
    return sweep_stops(name) + f"{below:06d}.json"


def sweep_source(name: str, sha256: str) -> str:
    return sweep(name) + f"source/{_sha(sha256)}"


def sweep_trials(name: str) -> str:
    return sweep(name) + "trials/"


def sweep_trial(name: str, number: int) -> str:
    """Return the path of the object that holds a trial's job id."""
    return sweep_trials(name) + f"{number:06d}"


def tomb(job: str) -> str:
    return f"tomb/{_job(job)}"


def quarantine(sha256: str) -> str:
    return QUARANTINE + _sha(sha256)

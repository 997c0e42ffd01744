"""What a job file and a stack document mean beyond types: one small validator per rule.

A validator is a generator of :class:`~spotkeeper.spec.parse.Problem`; :func:`check_job`
and :func:`check_stack` run them all and raise once. They look at the documents and at
the source folder, never at a cloud: a wrong file is refused before anything is written.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spotkeeper.spec import money
from spotkeeper.spec.command import SHELL_WORDS, argv, runner
from spotkeeper.spec.job import JobSpec, UnknownError, deadline_at
from spotkeeper.spec.names import JOB_NAME, POOL_NAME, STACK_NAME
from spotkeeper.spec.parse import Problem, SpecError, join, nearest, problem
from spotkeeper.spec.stack import PoolState, StackState

ENV_NAME = re.compile(r"[A-Z_][A-Z0-9_]{0,63}\Z")
ENV_VALUE_BYTES = 4096
WORD_BYTES = 131_071  # of one argument: Linux's MAX_ARG_STRLEN, less its NUL
RESERVED_PREFIX = "SPOTKEEPER_"
# Set by torchrun for every process: a value from the job file would break the rendezvous.
TORCHRUN_SETS = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    }
)
_SECRET_LOOKING = re.compile(r"(API_?KEY|PASSWORD|PASSWD|SECRET|SECRET_KEY|ACCESS_KEY|AUTH_TOKEN|(HF|GITHUB)_TOKEN)\Z")
_SECRETS = {
    "gcp": re.compile(r"gcp-secret://projects/[a-z0-9-]{1,63}/secrets/[-A-Za-z0-9_]{1,255}/versions/(latest|[0-9]+)\Z"),
    "aws": re.compile(
        r"aws-secret://arn:[a-z-]+:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[-A-Za-z0-9/_+=.@]{1,519}\Z"
    ),
}


@dataclass(frozen=True)
class JobContext:
    """What a job is checked against. None: not known here, so not checked."""

    spec: JobSpec
    stack: StackState | None = None
    folder: Path | None = None  # the job file's
    now: float | None = None  # unix seconds

    def pools(self) -> tuple[PoolState, ...]:
        """The pools of the stack that the job may use."""
        if self.stack is None:
            return ()
        wanted = [p for p in self.stack.pools if not self.spec.pools or p.name in self.spec.pools]
        return tuple(p for p in wanted if p.kind == "spot" or self.spec.static == "use")


def check_job(
    spec: JobSpec, stack: StackState | None = None, *, folder: Path | None = None, now: float | None = None
) -> JobSpec:
    """``spec`` itself, if nothing is wrong with it.

    Raises:
        SpecError: everything that is.
    """
    problems = job_problems(JobContext(spec, stack, folder, now))
    if problems:
        raise SpecError(problems)
    return spec


def job_problems(job: JobContext) -> list[Problem]:
    """All that is wrong with a job; of one that is known in part, what needs no other part to be said."""
    problems: list[Problem] = []
    for validator in JOB_VALIDATORS:
        with contextlib.suppress(UnknownError):
            for problem in validator(job):
                problems.append(problem)
    return problems


def job_name(job: JobContext) -> Iterator[Problem]:
    name = job.spec.name
    if not JOB_NAME.match(name):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:40].rstrip("-")
        hint = near if JOB_NAME.match(near) else None
        yield problem("name", "want a letter, then letters, digits and -, at most 40, all lower case", name, hint)


def node_range(job: JobContext) -> Iterator[Problem]:
    size = job.spec.size()
    if size.min > size.max:
        yield problem("nodes.min", f"is above nodes.max ({size.max})", size.min)
    elif size.min < size.max and not job.spec.checkpoint.replicated:
        yield problem("nodes", "sharded state (checkpoint.replicated: false) wants one number: no part may be missing")


def own_checkpoints(job: JobContext) -> Iterator[Problem]:
    """Of what a script saves by itself nobody knows which is the newest, so it stays with its rank's own disk."""
    spec, size = job.spec, job.spec.size()
    if spec.stop != "signal":
        return
    if spec.static != "never":
        yield problem("stop", "signal wants `static: never`, for its checkpoints stay on its own disks")
    if size.min < size.max:
        yield problem("stop", "signal wants one number of nodes: only the library can divide its batches anew")
    if spec.checkpoint.mirror is not None:
        yield problem("stop", "signal leaves nothing to copy for checkpoint.mirror, which knows what the library saves")


def command_words(job: JobContext) -> Iterator[Problem]:
    """An argv, not a shell line; the script itself, not what runs it."""
    command = job.spec.command
    if _sentence(command):
        such = f": {list(words)}" if (words := argv(command[0])) else ""
        yield problem("command", f"is one text with spaces, want one entry per word{such}", list(command))
        return
    for index, word in enumerate(command):
        if word in SHELL_WORDS:
            yield problem(join("command", index), "no shell runs the command: put the steps into a script", word)
        if "\0" in word:
            yield problem(join("command", index), "contains a NUL character")
        if len(word.encode()) > WORD_BYTES:
            at = join("command", index)
            yield Problem(at, f"is {len(word.encode()):,} bytes long, and no system takes more than {WORD_BYTES:,}")
    if not command[0]:
        yield problem("command[0]", "is empty, want the script's name")
    elif command[0] != command[0].strip():
        yield problem("command[0]", "has blanks around the script's name", command[0], command[0].strip())
    elif command[0] == "-m" and (len(command) < 2 or not command[1] or command[1][0] in "-."):
        yield problem("command", 'wants a module after "-m", such as my.package', list(command))
    elif command[0].startswith("-") and command[0] != "-m":
        yield problem("command[0]", "is an option, want the script's name, or -m and a module", command[0])
    if why := runner(command[0]):
        script = next((word for word in command[1:] if word.endswith(".py")), None)
        yield problem("command[0]", f"want the script: {why}", command[0], script)


def _sentence(command: tuple[str, ...]) -> bool:
    return len(command) == 1 and len(command[0].split()) > 1


def interpreter(job: JobContext) -> Iterator[Problem]:
    python = job.spec.python
    if not python.strip() or len(python.split()) > 1 or "\0" in python or python.startswith("-"):
        yield problem("python", "want one interpreter, such as python3 or /opt/venv/bin/python", python)


def warm_modules(job: JobContext) -> Iterator[Problem]:
    for index, name in enumerate(job.spec.warm):
        if not all(part.isidentifier() for part in name.split(".")):
            yield problem(join("warm", index), "want the name of a module, such as transformers", name)
    if job.spec.warm and job.spec.launcher != "zygote":
        yield problem("warm", f"needs `launcher: zygote`: {job.spec.launcher} imports everything anew")


def env_names(job: JobContext) -> Iterator[Problem]:
    for group, names in (("env", job.spec.env), ("secrets", job.spec.secrets)):
        for name in names:
            path = join(group, name)
            if not ENV_NAME.match(name):
                near = re.sub(r"[^A-Z0-9_]", "_", name.upper())[:64]
                hint = near if ENV_NAME.match(near) else None
                yield problem(path, "want a name of A-Z, 0-9 and _, at most 64, no digit first", hint=hint)
            elif name.startswith(RESERVED_PREFIX):
                yield problem(path, f"names that begin with {RESERVED_PREFIX} are set by Spotkeeper")
            elif name in TORCHRUN_SETS:
                yield problem(path, "is set by torchrun: remove it")


def env_values(job: JobContext) -> Iterator[Problem]:
    """Values are never repeated in a message: people paste secrets here."""
    for name, value in job.spec.env.items():
        size = len(value.encode(errors="surrogatepass"))
        if size > ENV_VALUE_BYTES:
            yield problem(
                join("env", name), f"has {size} bytes, at most {ENV_VALUE_BYTES}: put it into a file of `source`"
            )
        if "\0" in value:
            yield problem(join("env", name), "contains a NUL character")


def secrets_by_reference(job: JobContext) -> Iterator[Problem]:
    for name in job.spec.env:
        if _SECRET_LOOKING.search(name):
            yield problem(join("env", name), "looks like a secret, which no job file may hold: `secrets` names one")
    for name, reference in job.spec.secrets.items():
        if name in job.spec.env:
            yield problem(join("secrets", name), "is in `env` too: keep one")
        cloud = next((cloud for cloud, pattern in _SECRETS.items() if pattern.match(reference)), None)
        if cloud is None:  # the value is not repeated: people paste secrets here
            want = "gcp-secret://projects/.../versions/latest or aws-secret://<ARN>"
            yield problem(join("secrets", name), f"want where a secret is, not its value: {want}")
        elif job.stack is not None and cloud != job.stack.cloud:
            yield problem(join("secrets", name), f"is in another cloud than the stack ({job.stack.cloud})")


def secrets_have_a_reader(job: JobContext) -> Iterator[Problem]:
    """Refused rather than dropped: a job whose variable never comes would fail on every machine."""
    if job.spec.secrets and job.stack is not None and not job.stack.job_identity:
        yield problem("secrets", f"nobody can read them: stack {job.stack.stack} gives jobs no identity (job_identity)")


def deadline(job: JobContext) -> Iterator[Problem]:
    text = job.spec.deadline
    if text is None:
        return
    try:
        at = deadline_at(text, job.now or 0.0)
    except ValueError as error:
        yield problem("deadline", str(error), text)
        return
    if job.now is not None and at <= job.now:
        yield problem("deadline", "is in the past", text)


def money_and_time(job: JobContext) -> Iterator[Problem]:
    yield from money.spans(job.spec)
    yield from money.budget(job.spec, job.pools())
    yield from money.price_cap(job.spec, job.pools())
    if job.now is not None:
        yield from money.feasible(job.spec, job.pools(), job.now)


def policy_fits(job: JobContext) -> Iterator[Problem]:
    spec = job.spec
    if spec.policy == "on-demand" and spec.max_on_demand == 0:
        yield problem("max_on_demand", "forbids what `policy: on-demand` asks for: remove one", 0)
    if spec.policy == "spot" and spec.max_on_demand:
        yield problem("max_on_demand", "allows what `policy: spot` forbids: remove one", spec.max_on_demand)
    if spec.max_on_demand is not None and spec.max_on_demand > (most := spec.size().max):
        yield problem("max_on_demand", f"is above the number of nodes ({most})", spec.max_on_demand)


def source_hash(job: JobContext) -> Iterator[Problem]:
    if job.folder is not None and job.spec.source_sha256 is not None:
        yield problem("source_sha256", "is filled in by submit: remove it", job.spec.source_sha256)


def source_folder(job: JobContext) -> Iterator[Problem]:
    if job.folder is None:
        return
    if job.spec.source is None:
        yield from _unsent(job.folder, job.spec.command)
        return
    try:
        folder = (job.folder / job.spec.source).resolve()
        there = folder.exists()
    except (OSError, ValueError, RuntimeError) as error:  # no permission, too long, a NUL; a loop of links
        why = error.strerror if isinstance(error, OSError) else str(error)
        yield problem("source", f"cannot be a folder: {why}", job.spec.source)
        return
    if not there:
        siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        hint = nearest(folder.name, siblings)
        home = "; ~ stands for nothing here" if job.spec.source.startswith("~") else ""
        yield problem("source", f"no such folder (relative to the job file{home})", job.spec.source, hint)
    elif not folder.is_dir():
        yield problem("source", "is a file, want the folder that holds the script", job.spec.source)
    elif folder in (Path("/"), Path.home()):
        yield problem("source", "would send a whole home or root folder: name the project's folder", job.spec.source)
    else:
        yield from _script(folder, job.spec)


def _unsent(folder: Path, command: tuple[str, ...]) -> Iterator[Problem]:
    """Without a source the job runs in an empty folder: only a module (``-m``) or an absolute path can be there."""
    script = command[0]
    if _named(folder, script):
        yield problem("command[0]", "lies beside the job file, but no `source` sends it: add `source: .`", script)
    elif not (_sentence(command) or runner(script) or not script or script.startswith(("/", "-"))):
        what = "no `source` sends it: add `source: .`, or name the script by its absolute path on the machines"
        yield problem("command[0]", what, script)


def _script(folder: Path, spec: JobSpec) -> Iterator[Problem]:
    script = spec.command[0]
    if _sentence(spec.command) or runner(script) or not script.strip() or script.startswith(("/", "-")):
        return
    if _named(folder, script):
        return
    hint = nearest(
        script, [str(p.relative_to(folder)) for p in list(folder.glob("*.py")) + list(folder.glob("*/*.py"))]
    )
    yield problem("command[0]", f"no such file in `source` ({spec.source})", script, hint)


def requirements(job: JobContext) -> Iterator[Problem]:
    file = job.spec.requirements
    if file is None:
        return
    if job.spec.source is None:
        yield problem("requirements", "is a file of `source`, and there is none: add `source: .`", file)
    elif file.startswith("/") or ".." in Path(file).parts or "\0" in file:
        yield problem("requirements", "want a file of `source`, named as from there", file)
    elif not (file.endswith(".txt") or Path(file).name == "uv.lock"):
        what = "want a requirements file (.txt) or uv.lock"
        yield problem("requirements", what, file, "uv.lock" if Path(file).name == "pyproject.toml" else None)
    elif job.folder is not None:
        folder = job.folder / job.spec.source
        names = [file] if file.endswith(".txt") else [file, str(Path(file).with_name("pyproject.toml"))]
        missing = next((name for name in names if folder.is_dir() and not _named(folder, name)), None)
        if missing is not None:
            hint = nearest(missing, [str(path.relative_to(folder)) for path in folder.glob("*.txt")])
            yield problem("requirements", f"no such file in `source` ({job.spec.source})", missing, hint)


def _named(folder: Path, script: str) -> bool:
    """Whether this is a file of the folder, named as from there."""
    try:
        return not script.startswith("/") and (folder / script).is_file()
    except OSError:  # too long for a name, or in a folder that cannot be read
        return False


def pools_exist(job: JobContext) -> Iterator[Problem]:
    names = [pool.name for pool in job.stack.pools] if job.stack else None
    counts = Counter(job.spec.pools)
    for index, name in enumerate(job.spec.pools):
        path = join("pools", index)
        if counts[name] > 1 and job.spec.pools.index(name) != index:
            yield problem(path, "is named twice", name)
        elif names is not None and name not in names:
            hint = nearest(name, names)
            known = "" if hint else f" (it has {', '.join(names) or 'none'})"
            assert job.stack is not None
            yield problem(path, f"the stack {job.stack.stack} has no such pool{known}", name, hint)


def pools_usable(job: JobContext) -> Iterator[Problem]:
    """Named pools that another line of the file rules out altogether."""
    named = [p for p in job.stack.pools if p.name in job.spec.pools] if job.stack else []
    if named and not job.pools():
        yield problem("static", "rules out every pool under `pools`: all of them are static", job.spec.static)
    usable = job.pools()
    if usable and job.spec.policy == "on-demand" and all(p.kind == "spot" and not p.max_on_demand for p in usable):
        yield problem("policy", f"no on-demand machine is allowed in {_names(usable)}", job.spec.policy)


def capacity(job: JobContext) -> Iterator[Problem]:
    """The pools' caps, and one zone's for a gang that is not spread."""
    usable = job.pools()
    if not usable or any(name not in {p.name for p in usable} for name in job.spec.pools):
        return
    most = job.spec.size().max
    path = "nodes" if isinstance(job.spec.nodes, int) else "nodes.max"
    total = sum(pool.max_nodes for pool in usable)
    if most > total:
        yield problem(path, f"more than {_names(usable)} may hold ({total})", most)
        return
    zones = {zone for pool in usable for zone in pool.zones}
    best = max(zones, key=lambda zone: (_in_zone(usable, zone), zone))
    if not job.spec.spread and most > _in_zone(usable, best):
        message = f"no zone may hold as many ({best}: {_in_zone(usable, best)}): add `spread: true` or ask for less"
        yield problem(path, message, most)


def _in_zone(pools: tuple[PoolState, ...], zone: str) -> int:
    spot = sum(pool.max_nodes for pool in pools if pool.kind == "spot" and zone in pool.zones)
    return spot + sum(node.zone == zone for pool in pools for node in pool.nodes)


def processes(job: JobContext) -> Iterator[Problem]:
    for pool in job.pools():
        if job.spec.nproc is not None and 1 < pool.nproc < job.spec.nproc:
            yield problem("nproc", f"a machine of {pool.name} has {pool.nproc} devices", job.spec.nproc)


def _names(pools: tuple[PoolState, ...]) -> str:
    return ("pool " if len(pools) == 1 else "pools ") + ", ".join(pool.name for pool in pools)


JOB_VALIDATORS = (
    job_name,
    node_range,
    own_checkpoints,
    command_words,
    interpreter,
    warm_modules,
    env_names,
    env_values,
    secrets_by_reference,
    secrets_have_a_reader,
    deadline,
    money_and_time,
    policy_fits,
    source_hash,
    source_folder,
    requirements,
    pools_exist,
    pools_usable,
    capacity,
    processes,
)


# --- stack/pools.json -----------------------------------------------------------------


def check_stack(state: StackState) -> StackState:
    """``state`` itself, if what Pulumi wrote makes sense.

    Raises:
        SpecError: everything that does not.
    """
    problems = list(stack_names(state))
    for index, pool in enumerate(state.pools):
        path = join("pools", index)
        for validator in POOL_VALIDATORS:
            problems += [Problem(f"{path}.{p.path}", p.message, p.value, p.hint) for p in validator(pool, state)]
    if problems:
        raise SpecError(problems)
    return state


def stack_names(state: StackState) -> Iterator[Problem]:
    if not STACK_NAME.match(state.stack):
        yield problem("stack", "want a letter, then letters, digits and -, at most 24, all lower case", state.stack)
    seen: set[str] = set()
    for index, pool in enumerate(state.pools):
        path = join(join("pools", index), "name")
        if pool.name in seen:
            yield problem(path, "another pool has this name", pool.name)
        elif not POOL_NAME.match(pool.name):
            yield problem(path, "want a letter, then letters, digits and -, at most 24, all lower case", pool.name)
        seen.add(pool.name)


def pool_zones(pool: PoolState, state: StackState) -> Iterator[Problem]:
    for index, zone in enumerate(pool.zones):
        if zone in pool.zones[:index]:
            yield problem(join("zones", index), "is named twice", zone)
        elif not zone.startswith(state.region):
            others = [z for z in state.zones() if z.startswith(state.region)]
            yield problem(join("zones", index), f"is not a zone of {state.region}", zone, nearest(zone, others))
    for zone in pool.placement:
        if zone not in pool.zones:
            yield problem(join("placement", zone), "is not a zone of this pool", hint=nearest(zone, pool.zones))


def pool_prices(pool: PoolState, state: StackState) -> Iterator[Problem]:
    for zone in pool.zones:
        price = pool.prices.get(zone)
        if price is None:
            yield problem(join("prices", zone), "missing, want the prices of this zone")
        elif price.spot is not None and price.spot > price.on_demand:
            yield problem(join(join("prices", zone), "spot"), "is above the on-demand price", price.spot)
    for zone in pool.prices:
        if zone not in pool.zones:
            yield problem(join("prices", zone), "is not a zone of this pool", hint=nearest(zone, pool.zones))


def pool_kind(pool: PoolState, state: StackState) -> Iterator[Problem]:
    """A spot pool needs templates, a static one its nodes; neither may have the other's."""
    if pool.max_on_demand > pool.max_nodes:
        yield problem("max_on_demand", f"is above max_nodes ({pool.max_nodes})", pool.max_on_demand)
    for model in pool.templates:
        if model not in ("spot", "on-demand"):
            yield problem(join("templates", model), "is no model", hint=nearest(model, ("spot", "on-demand")))
    if pool.kind == "spot":
        if "spot" not in pool.templates:
            yield problem("templates.spot", "missing, want the template's link")
        if pool.max_on_demand and "on-demand" not in pool.templates:
            yield problem("templates.on-demand", "missing, but max_on_demand is above 0")
        if pool.nodes:
            yield problem("nodes", "only a static pool has nodes", len(pool.nodes))
        return
    if len(pool.nodes) != pool.max_nodes:
        yield problem("nodes", f"has {len(pool.nodes)} entries, but max_nodes is {pool.max_nodes}")
    for index, node in enumerate(pool.nodes):
        if node.zone not in pool.zones:
            path = join(join("nodes", index), "zone")
            yield problem(path, "is not a zone of this pool", node.zone, nearest(node.zone, pool.zones))


def pool_ec2(pool: PoolState, state: StackState) -> Iterator[Problem]:
    """On AWS a spot pool can be had in each of its zones, from a template at one version."""
    if state.cloud != "aws" or pool.kind != "spot":
        return
    for zone in pool.zones:
        if zone not in pool.subnets:
            yield problem(join("subnets", zone), "missing, want the subnet of this zone")
    for model in pool.templates:
        if model not in pool.template_versions:
            yield problem(join("template_versions", model), "missing, want the version of its launch template")


POOL_VALIDATORS = (pool_zones, pool_prices, pool_kind, pool_ec2)

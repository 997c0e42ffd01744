"""Rules on a job's command, source folder, interpreter, packages, variables and secrets.

``check.py`` has the other rules, calls these and passes the :class:`JobContext`. Messages never repeat values of
variables, since users paste secrets there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from spotkeeper.contract.job import START_S, JobSpec, named_pools, pools_of
from spotkeeper.contract.parse.problem import SHELL_WORDS, Problem, argv, join, nearest, problem, runner
from spotkeeper.contract.stack import LOCAL_PROJECT, PoolState, StackState, region_of

IMAGE = re.compile(  # registry, repository, digest: podman would look up a name without a registry elsewhere
    r"(?=[a-z0-9].{1,511}\Z)(localhost|[a-z0-9-]+(\.[a-z0-9-]+)+|[a-z0-9.-]+(?=:))(:[0-9]{1,5})?"
    r"(/[a-z0-9]+([._-]+[a-z0-9]+)*)+@sha256:[0-9a-f]{64}\Z"
)
WORD_BYTES = 131_071  # longest argument: Linux's MAX_ARG_STRLEN without the NUL
ENV_NAME = re.compile(r"[A-Z_][A-Z0-9_]{0,63}\Z")
ENV_VALUE_BYTES = 4096
RESERVED_PREFIX = "SPOTKEEPER_"
# torchrun sets these for every process: a value from the job file would break the rendezvous.
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
    """A job and the values that its rules need. None means unknown; rules that need the value are then skipped.

    ``folder``: the job file's folder; ``starts``: returns how long a start of a job takes, in seconds.
    """

    spec: JobSpec
    stack: StackState | None = None
    folder: Path | None = None
    now: float | None = None  # unix seconds
    starts: Callable[[JobSpec], float] = lambda _: START_S

    def pools(self) -> tuple[PoolState, ...]:
        return () if self.stack is None else pools_of(self.spec, self.stack)


def unknown_region(job: JobContext) -> bool:
    """Whether the job names a region that the stack is not in, which :func:`regions_exist` reports."""
    stack = job.stack
    return stack is not None and not set(job.spec.regions) <= {stack.region, *stack.regions}


def regions_exist(job: JobContext) -> Iterator[Problem]:
    """Check that the stack is in the job's regions, and that each pool that the job names has zones there."""
    spec, stack = job.spec, job.stack
    for index, name in enumerate(spec.regions):
        path = join("regions", index)
        if name in spec.regions[:index]:
            yield problem(path, "is named twice", name)
        elif stack is not None and name not in (known := stack.regions or (stack.region,)):
            told = f"the stack {stack.stack} is not in this region, only in {', '.join(known)}"
            yield problem(path, told, name, nearest(name, known))
    home = () if stack is None else stack.regions or (stack.region,)
    if spec.data_region and home and spec.data_region not in home:
        told = f"want a region of the stack: {', '.join(home)}"
        yield problem("data_region", told, spec.data_region, nearest(spec.data_region, home))
    if spec.spread and len(set(spec.regions)) > 1:
        yield problem("spread", "a gang cannot train across regions: name one of them in `regions`", spec.spread)
    if stack is None or not stack.regions or unknown_region(job):
        return
    regions = spec.regions or (stack.region,)
    usable = {pool.name for pool in named_pools(spec, stack) if pool.zones}
    for index, name in enumerate(spec.pool_names()):
        pool = stack.pool(name)
        if pool is not None and name not in usable:
            there = ", ".join(dict.fromkeys(map(region_of, pool.zones)))
            told = f"has no zone in {', '.join(regions)}, only in {there}: add one of its regions to `regions`"
            path = f"{join('machines', index)}.pool" if spec.machines else join("pools", index)
            yield problem(path, told, name)
    if not usable and not spec.pool_names():
        yield problem("regions", "no pool of the stack has a zone in these regions", list(regions))


def command_words(job: JobContext) -> Iterator[Problem]:
    """Check that the command is a list of words, not a shell line, and begins with the script, not with its runner."""
    command = job.spec.command
    if _sentence(command):
        such = f": {list(words)}" if (words := argv(command[0])) else ""
        yield problem("command", f"is one text with spaces, want one entry per word{such}", list(command))
        return
    for index, word in enumerate(command):
        if word in SHELL_WORDS:
            yield problem(join("command", index), "is for a shell, but no shell runs the command: use a script", word)
        if "\0" in word:
            yield problem(join("command", index), "contains a NUL character")
        if len(word.encode()) > WORD_BYTES:
            at = join("command", index)
            yield Problem(at, f"is {len(word.encode()):,} bytes long, but Linux takes at most {WORD_BYTES:,}")
    if not command[0]:
        yield problem("command[0]", "is empty, want the script's name")
    elif command[0] != command[0].strip():
        yield problem("command[0]", "has blanks around the script's name", command[0], command[0].strip())
    elif command[0] == "-m" and (len(command) < 2 or not command[1] or command[1][0] in "-."):
        yield problem("command", 'wants a module after "-m", such as my.package', list(command))
    elif command[0].startswith("-") and command[0] != "-m":
        yield problem("command[0]", "is an option: want the script's name, or -m and a module", command[0])
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
        yield problem("warm", f"needs `launcher: zygote`, since `{job.spec.launcher}` imports everything at each start")


def container_image(job: JobContext) -> Iterator[Problem]:
    """Check that `image` names its registry and a digest, that no other field excludes it, and that machines run it."""
    spec = job.spec
    if spec.image is None:
        return
    if not IMAGE.match(spec.image):
        yield problem("image", _wrong_image(spec.image), spec.image)
    if job.stack is not None and job.stack.project == LOCAL_PROJECT:
        yield Problem("image", "machines of the one-machine cloud run no containers: leave it out there")
    if spec.requirements is not None:
        yield problem("requirements", "excludes `image`: install the packages in the image", spec.requirements)
    if spec.warm:
        yield problem("warm", "excludes `image`: each start of a container imports everything", list(spec.warm))


def _wrong_image(image: str) -> str:
    name, _, digest = image.partition("@sha256:")
    if not digest:
        return "a tag may be another image tomorrow, so want the digest: docker.io/pytorch/pytorch@sha256:64 hex digits"
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        return f"want 64 hex digits (0-9, a-f) after @sha256:, got {len(digest)} characters"
    if "/" not in name:
        return "want the registry and the repository before the digest: docker.io/pytorch/pytorch@sha256:..."
    return "want REGISTRY/REPOSITORY@sha256:DIGEST in lower case and without a tag, such as docker.io/pytorch/pytorch"


def source_hash(job: JobContext) -> Iterator[Problem]:
    if job.folder is not None and job.spec.source_sha256 is not None:
        yield problem("source_sha256", "is filled in by submit: remove it", job.spec.source_sha256)
    if job.folder is not None and job.spec.trial is not None:
        yield problem("trial", "is filled in by sweep: remove it")


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
        home = "; ~ is not expanded here" if job.spec.source.startswith("~") else ""
        yield problem("source", f"no such folder (relative to the job file{home})", job.spec.source, hint)
    elif not folder.is_dir():
        yield problem("source", "is a file, want the folder with the script", job.spec.source)
    elif folder in (Path("/"), Path.home()):
        yield problem("source", "would send a whole home or root folder: name the project's folder", job.spec.source)
    else:
        yield from _script(folder, job.spec)


def _unsent(folder: Path, command: tuple[str, ...]) -> Iterator[Problem]:
    """Check that the command of a job without `source` names a module, or a script by its absolute path."""
    script = command[0]
    if _named(folder, script):
        yield problem("command[0]", "is beside the job file, but is not sent: add `source: .`", script)
    elif not (_sentence(command) or runner(script) or not script or script.startswith(("/", "-"))):
        what = "is not sent to the machines: add `source: .`, or use the script's absolute path on the machines"
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
        yield problem("requirements", "must be in `source`, which is missing: add `source: .`", file)
    elif file.startswith("/") or ".." in Path(file).parts or "\0" in file:
        yield problem("requirements", "want a file of `source`, with its path in that folder", file)
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
    """Whether ``script`` is the path, relative to ``folder``, of an existing file."""
    try:
        return not script.startswith("/") and (folder / script).is_file()
    except OSError:  # the name is too long, or its folder is unreadable
        return False


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
    """Check that values are short and have no NUL. Messages never repeat values, since users paste secrets here."""
    for name, value in job.spec.env.items():
        size = len(value.encode(errors="surrogatepass"))
        if size > ENV_VALUE_BYTES:
            yield problem(
                join("env", name), f"has {size} bytes, more than {ENV_VALUE_BYTES}: put it into a file of `source`"
            )
        if "\0" in value:
            yield problem(join("env", name), "contains a NUL character")


def secrets_by_reference(job: JobContext) -> Iterator[Problem]:
    for name in job.spec.env:
        if _SECRET_LOOKING.search(name):
            remedy = "move it to `secrets`, with its address in the cloud's secret store instead of its value"
            yield problem(join("env", name), f"looks like a secret: {remedy}")
    for name, reference in job.spec.secrets.items():
        if name in job.spec.env:
            yield problem(join("secrets", name), "is in `env` too: keep only one")
        cloud = next((cloud for cloud, pattern in _SECRETS.items() if pattern.match(reference)), None)
        if cloud is None:  # the message does not repeat the value: users paste secrets here
            want = "gcp-secret://projects/.../versions/latest or aws-secret://<ARN>"
            yield problem(join("secrets", name), f"want the address of a secret, not its value: {want}")
        elif job.stack is not None and cloud != job.stack.cloud:
            yield problem(join("secrets", name), f"is in another cloud than the stack ({job.stack.cloud})")


def secrets_have_a_reader(job: JobContext) -> Iterator[Problem]:
    """Check that the stack gives jobs an identity to read secrets, since a job without it fails on every machine."""
    if job.spec.secrets and job.stack is not None and not job.stack.job_identity:
        yield problem("secrets", f"no job can read secrets, since stack {job.stack.stack} has no `job_identity`")

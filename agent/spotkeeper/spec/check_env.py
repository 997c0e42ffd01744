"""A job's variables and secrets: what may be one, and what no job file may hold. Rules of ``spec.check``.

Values are never repeated in a message: people paste secrets here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from spotkeeper.spec.context import JobContext
from spotkeeper.spec.problem import Problem, join, problem

ENV_NAME = re.compile(r"[A-Z_][A-Z0-9_]{0,63}\Z")
ENV_VALUE_BYTES = 4096
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

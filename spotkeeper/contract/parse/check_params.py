"""Rules on a job's parameters, and on the places in its command where their values go."""

from __future__ import annotations

from collections.abc import Iterator

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.parse.check_run import JobContext
from spotkeeper.contract.parse.problem import Problem, join, nearest, problem
from spotkeeper.contract.sweepfile import PARAM, finite, placeholders

TEXT_BYTES = 4096  # most of a text's value
ALL_BYTES = 32_768  # most of all parameters: the processes of the job get them in one variable
WANT_NAME = "want a name of letters, digits and _, at most 64, no digit first"


def params(job: JobContext) -> Iterator[Problem]:
    """Check names and values of `params`."""
    total = 0
    for name, value in job.spec.params.items():
        path, size = join("params", name), len(str(value).encode(errors="surrogatepass"))
        total += size + len(name.encode(errors="surrogatepass"))
        if not PARAM.match(name):
            yield problem(path, WANT_NAME)
        elif not finite(value):
            yield problem(path, "want a finite number", value)
        elif isinstance(value, str) and "\0" in value:
            yield problem(path, "contains a NUL character")
        elif size > TEXT_BYTES:
            yield problem(path, f"has {size} bytes, more than {TEXT_BYTES}: put it into a file of `source`")
    if total > ALL_BYTES:
        yield problem("params", f"have {total} bytes, more than {ALL_BYTES}: put them into a file of `source`")


def placeholder_problems(spec: JobSpec) -> Iterator[Problem]:
    """Yield a problem for each ``{name}`` in the command that is no parameter. The command is not filled in yet."""
    for index, word in enumerate(spec.command):
        for name in placeholders(word):
            if name not in spec.params:
                remedy = f"add it to `params`, or write {{{{{name}}}}} for the text {{{name}}}"
                hint = nearest(name, spec.params)
                yield problem(join("command", index), f"no parameter has the name {name}: {remedy}", word, hint)

"""Options and help of the commands to use before a job starts; each imports and calls its module in `jobs/`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from spotkeeper.cli.app import JOBS, Json, Stack, app

JobFile = Annotated[Path, Argument(metavar="JOB.YAML", help="The job file.")]
StackFile = Annotated[
    Path | None, Option("--stack-file", metavar="FILE", help="Stack file (Pulumi.NAME.yaml); the stack need not run.")
]
Markets = Annotated[
    Path | None,
    Option(metavar="DIR", help="Folder of recorded markets. Default: SPOTKEEPER_MARKETS, else the shipped folder."),
]


@app.command("check-script", rich_help_panel=JOBS)
def check_script(
    script: Annotated[Path, Argument(metavar="TRAIN.PY", help="The training script.")],
    arguments: Annotated[list[str] | None, Argument(metavar="[-- ARGS...]", help="Arguments of the script.")] = None,
    steps: Annotated[int, Option(metavar="N", min=3, help="Optimizer steps per run.")] = 12,
    nproc: Annotated[
        int, Option(metavar="N", min=1, help="Number of processes; torchrun starts them if there are several.")
    ] = 1,
    python: Annotated[
        str | None, Option(metavar="PATH", help="Python interpreter that has torch. Default: that of this command.")
    ] = None,
    ignore: Annotated[
        list[str] | None, Option(metavar="NAME", help="Variable that need not be restored (repeatable).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check on this machine that a training script resumes bit for bit, and name the state that it does not restore.

    It runs the script for some steps: twice without a stop, then once with two stops and resumes. Each run has
    processes of its own, and its checkpoints go to a folder that is deleted afterwards. It compares the parameters,
    the optimizer, everything else given to `attach()`, the random state, and the batch and reported loss of each step.
    It names variables, generators and data sets of the script that differ after a resume, and says what to change.

    The exit code is 0 if all runs are equal, else 1 (also if the two runs without a stop already differ).

    Examples: `spotkeeper check-script train.py`, `spotkeeper check-script train.py --nproc 2 --steps 30 -- --lr 3e-4`
    """
    from spotkeeper.cli.jobs import check_script as checking

    checking.run([str(script), *(arguments or [])], steps, nproc, python, ignore or [], as_json)


@app.command(rich_help_panel=JOBS)
def forecast(
    file: JobFile,
    work: Annotated[
        str | None, Option(metavar="40h", help="Training time without interruptions. Default: `work` in the job file.")
    ] = None,
    stack_file: StackFile = None,
    markets: Markets = None,
    markdown: Annotated[
        bool, Option("--markdown", help="Print Markdown, for example for a pull request comment.")
    ] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Forecast what a job costs on spot and when it ends, with ranges that contain four of five outcomes.

    It simulates the purchase of machines on recorded markets, and on the stack's own history if there is any, and
    compares the result with on-demand machines alone. It prints its assumptions, starts nothing and calls no cloud.

    Examples: `spotkeeper forecast job.yaml --work 40h`, `spotkeeper forecast job.yaml --json | jq .expected.usd`
    """
    from spotkeeper.cli.jobs import forecast as forecasting

    forecasting.run(file, stack, stack_file, work, markets, as_markdown=markdown, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def compare(
    file: JobFile,
    work: Annotated[
        str | None, Option(metavar="40h", help="Training time on the machines of the job file, without interruptions.")
    ] = None,
    step_time: Annotated[
        float | None, Option(metavar="SECONDS", min=1e-6, help="Duration of a step on the machines of the job file.")
    ] = None,
    measure: Annotated[
        bool, Option("--measure", help="Run the job's command here for a dozen steps to measure a step's duration.")
    ] = False,
    gradients_gb: Annotated[
        float,
        Option(
            metavar="GB",
            min=0.0,
            help="Size of the gradients that a step sums over all machines: 2.6 for 1.3 billion parameters in bf16.",
        ),
    ] = 0.0,
    stack_file: StackFile = None,
    markets: Markets = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Compare cost and duration of a job on every pool of the stack, on spot and on-demand.

    It takes enough machines of each pool for the job's processes: four processes fit on four machines with one GPU or
    on one machine with four. It derives the duration of a step from one known duration (given, measured, or reported by
    an earlier job of this name) and from the networks between machines. It prints its assumptions and starts nothing.

    Examples: `spotkeeper compare job.yaml --work 40h --step-time 0.8 --gradients-gb 2.6`,
    `spotkeeper compare job.yaml --measure`
    """
    from spotkeeper.cli.jobs import compare as comparing

    comparing.run(file, stack, stack_file, work, markets, step_time, gradients_gb, measure=measure, as_json=as_json)

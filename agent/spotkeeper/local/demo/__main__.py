"""The main job, end to end: cloud up, stack up, train through a storm, prove it, destroy, leave nothing.

python -m spotkeeper.local.demo [--seed N] [--steps N] [--scale N]
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.live import Live

from spotkeeper.cli.jobs import log_data, view_of
from spotkeeper.cli.localcloud import STACK, STACK_FILE, local_target
from spotkeeper.cli.pack import Source, pack
from spotkeeper.cli.poke import poke
from spotkeeper.cli.submit import submit
from spotkeeper.local import deploy
from spotkeeper.local.cloud import LeftOver, LocalCloud
from spotkeeper.local.demo import proof, show
from spotkeeper.local.demo.field import Field
from spotkeeper.local.demo.storm import Storm, StormError, ticks
from spotkeeper.local.demo.watcher import Watcher
from spotkeeper.local.deploy.show import Printer, summary
from spotkeeper.local.single import BusyError, only_one
from spotkeeper.reconcile.store_api import Store
from spotkeeper.report.preemptions import preemptions
from spotkeeper.report.view import JobView, Site
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.jobfile import read_job
from spotkeeper.spec.record import Hold, Outcome, Phase, Record

ROOT = Path(__file__).resolve().parents[4]
JOB_FILE = ROOT / "examples" / "gpt" / "job.yaml"
FOLDER = Path(".spotkeeper") / "demo"
STEPS = 700
STEP_S = 0.15  # real; at least. A fast machine would be through with so small a model before the storm is over
SCALE = 12.0  # a minute of the cloud's time is five seconds, a notice of 120 s is ten
PER_ZONE = 8  # spot machines that fit a zone, where the recording shows all of its capacity
CALM_S = 3600.0  # virtual; an hour of the recording in which the market takes nothing: the storm does
WIDTH = 140  # of lines that go to a file
INTERRUPTED = 130  # as a shell counts it
END_S = 240.0  # real; for the rest of the training, after the storm


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1, help="draws another storm")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of the job")
    parser.add_argument(
        "--scale", type=float, default=SCALE, help="how many times faster than real the cloud's clock runs"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where everything is written")
    parser.add_argument("--engine", choices=("auto", "pulumi", "in-process"), default="auto")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """0 only if everything that the report claims holds; 2: another demo is at work here; 130: Ctrl-C."""
    args = parse(sys.argv[1:] if argv is None else argv)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    stop = Stop()
    stop.listen()
    try:
        with only_one(args.folder, "make demo", "take another folder: make demo ARGS=--folder=.spotkeeper/second"):
            return attempt(Demo(args, console, stop), console)
    except BusyError as error:
        console.print(f"[bold red]the demo did not start:[/] {error}", highlight=False)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


class Stop:
    """Ctrl-C, SIGTERM, or a closed terminal: raised where the main thread is, once.

    A library may swallow what is raised in the middle of it (some catch everything while they are imported), so
    whoever begins a step asks again with ``check``.
    """

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        for end in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(end, self._heard)

    def check(self) -> None:
        """
        Raises:
            KeyboardInterrupt: somebody asked the demo to stop.
        """
        if self.asked:
            raise KeyboardInterrupt

    def _heard(self, *_: object) -> None:
        first, self.asked = not self.asked, True  # a second one must not leave half of the cleaning
        if first:
            raise KeyboardInterrupt


def attempt(demo: Demo, console: Console) -> int:
    """One run, whose every end cleans up; the exit code."""
    try:
        return demo.run()
    except KeyboardInterrupt:
        console.print("\n[bold]stopped; cleaning up[/]")
        return INTERRUPTED
    except (StormError, DemoError, deploy.DeployError, RuntimeError) as error:
        console.print(f"\n[bold red]the demo failed:[/] {error}", markup=True, highlight=False)
        return 1
    finally:
        demo.clean_up()


class DemoError(Exception):
    """Something the demo promises did not hold."""


class Demo:
    """One run. Every step leaves ``clean_up`` able to remove what it made."""

    def __init__(self, args: argparse.Namespace, console: Console, stop: Stop) -> None:
        self.args = args
        self.stop = stop
        self.console = console
        self.folder: Path = args.folder.resolve()
        self.cloud: LocalCloud | None = None
        self.notes: list[str] = []

    def run(self) -> int:
        began = time.monotonic()
        cloud, engine = self.bring_up()
        self.say("a job is submitted: a byte-level GPT on three machines, one static, two spot")
        spec, source = self.job()
        store = local_target(cloud.folder).store()
        self.until("the static node to be up", lambda: bool(store.list_static_hellos()))
        job = self.submit(store, spec, source)
        with Watcher(cloud.folder / "vms", job) as watcher:
            self.train(cloud, store, job, watcher)
            record = self.outcome(store, job)
        weights = proof.weights_in(log_data(store, record, 0)[1].decode(errors="replace"))
        bill = cloud.bill().bill
        ledger = (*store.list_ledger(job), *record.outbox)
        left = self.destroy(cloud)
        self.say("the same job again, left alone, under plain torchrun, as fast as it can: a minute")
        with self.console.status("no view of it: nothing happens to it"):
            alone = proof.left_alone(JOB_FILE.parent, self.training(), 3, dict(spec.env), self.folder / "alone")
        done = proof.Report(
            steps=self.args.steps,
            generations=record.gen,
            preemptions=preemptions(ledger),
            recoveries=proof.recovered(watcher.traces(), ledger, cloud.clock),
            cost=proof.Cost(bill.spent, bill.on_demand_only, bill.on_demand_only - bill.spent),
            weights_identical=weights is not None and weights == alone,
            left_over=left,
            engine=engine,
        )
        done.write(self.folder / "report.json")
        show.report(self.console, done, weights, time.monotonic() - began, self.folder / "report.json")
        return 0 if done.holds() else 1

    # -- the steps

    def bring_up(self) -> tuple[LocalCloud, str]:
        """A cloud of its own, fresh; one that an interrupted run left behind is removed first."""
        self._end_cloud()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.say(f"a cloud on this machine: three zones, spot market replayed, {self.args.scale:g} times as fast")
        self.cloud = cloud = LocalCloud.up(
            self.folder / "cloud", scale=self.args.scale, seed=self.args.seed, per_zone=PER_ZONE, calm_s=CALM_S
        )
        self.say("pulumi up: what the project's own Pulumi program declares")
        done = deploy.up(
            STACK, STACK_FILE, cloud.endpoint, cloud.folder / "deploy", Printer(self.console), engine=self.args.engine
        )
        summary(done, self.console)
        return cloud, done.engine

    def job(self) -> tuple[JobSpec, Source]:
        spec = read_job(JOB_FILE, None, 0.0)
        # Every VM shares this machine's cores: what boots or saves goes before what trains.
        command = (*self.training(), "--step-s", str(STEP_S), "--nice", "10")
        return replace(spec, command=command), pack(JOB_FILE.parent)

    def training(self) -> tuple[str, ...]:
        """What decides the weights."""
        return ("train.py", "--steps", str(self.args.steps))

    def submit(self, store: Store, spec: JobSpec, source: Source) -> str:
        assert self.cloud is not None
        done = submit(store, spec, source, self.cloud.clock.now())
        poke(local_target(self.cloud.folder), done.job)
        return done.job

    def train(self, cloud: LocalCloud, store: Store, job: str, watcher: Watcher) -> None:
        """The storm in a thread of its own, the live view here."""

        def read() -> Record | None:
            held = store.read_record(job)
            return held.value if held else None

        field = Field(cloud, job)
        storm = Storm(STACK, job, field, watcher, read, self.notes.append, random.Random(self.args.seed))  # noqa: S311
        failure: list[Exception] = []
        done = threading.Event()
        thread = threading.Thread(target=_guarded, args=(storm.run, failure, done), name="storm", daemon=True)
        thread.start()
        self.watch(lambda: self.look(store, job, watcher), done, failure)

    def look(self, store: Store, job: str, watcher: Watcher) -> JobView:
        """The view as ``spotkeeper watch`` shows it, with the step of this very moment."""
        assert self.cloud is not None
        held = store.read_record(job)
        assert held is not None
        clock = self.cloud.clock
        view = view_of(store, held.value, store.read_stack(), clock.now(), Site(clock.scale, local=True))
        return replace(view, step=watcher.step() or view.step, total_steps=self.args.steps)

    def watch(self, look: Callable[[], JobView], done: threading.Event, failure: list[Exception]) -> None:
        """Show the job until it is over.

        Raises:
            StormError: the storm failed, or the job did not end after it.
        """
        screen = show.Screen(self.console, self.notes)
        end = float("inf")
        with (
            Live(console=self.console, auto_refresh=False, transient=True)
            if self.console.is_terminal
            else nullcontext() as live
        ):
            while True:
                self.stop.check()
                view = look()
                screen.update(view, live)
                if failure:
                    raise failure[0]
                if view.stands():
                    break
                if done.is_set() and end == float("inf"):
                    end = time.monotonic() + END_S
                if time.monotonic() > end:
                    raise StormError(f"the job did not end within {END_S:.0f} s after the storm")
                time.sleep(0.5)
        screen.last(view)
        if not done.wait(5):
            raise StormError("the job ended before the storm was over: give it more --steps")

    def outcome(self, store: Store, job: str) -> Record:
        """The record of the ended job, once nothing of it is left.

        Raises:
            DemoError: it did not succeed, or does not end.
        """

        def done() -> bool:
            held = store.read_record(job)
            if held is not None and held.value.hold is Hold.FAILURE:
                raise DemoError(f"the job failed: {held.value.reason}")
            return held is not None and held.value.phase is Phase.DONE

        self.until("everything of the ended job to be gone", done)
        held = store.read_record(job)
        assert held is not None
        if held.value.outcome is not Outcome.SUCCEEDED:
            raise DemoError(f"the job {held.value.outcome}: {held.value.reason}")
        return held.value

    def destroy(self, cloud: LocalCloud) -> LeftOver:
        self.say("pulumi destroy")
        deploy.destroy(
            STACK, STACK_FILE, cloud.endpoint, cloud.folder / "deploy", Printer(self.console), engine=self.args.engine
        )
        left = cloud.down(purge=True)
        self.cloud = None
        return left

    def clean_up(self) -> None:
        """Whatever is still there goes; safe to call at any point."""
        self.stop.asked = True  # from here on nothing interrupts
        self._end_cloud()

    def _end_cloud(self) -> None:
        """Found by its folder: one that was interrupted while it came up has no name here yet."""
        folder = self.folder / "cloud"
        if (folder / "cloud.json").is_file():
            LocalCloud.attach(folder).down(purge=True)
        self.cloud = None

    def until(self, what: str, look: Callable[[], bool], seconds: float = 60.0) -> None:
        """
        Raises:
            DemoError: not within so many real seconds.
        """
        for _ in ticks(seconds):
            self.stop.check()
            if look():
                return
        raise DemoError(f"waited {seconds:.0f} s for {what}")

    def say(self, text: str) -> None:
        self.stop.check()
        self.console.print(f"\n[bold cyan]==>[/] [bold]{text}[/]", highlight=False)


def _guarded(run: Callable[[], None], failure: list[Exception], done: threading.Event) -> None:
    try:
        run()
    except Exception as error:  # whatever it is, the main thread raises it
        failure.append(error)
    done.set()


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())

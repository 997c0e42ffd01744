"""Runs the demo: start a cloud, deploy a stack, train while machines are preempted, check the weights, destroy all.

python -m spotkeeper.local.demo [--seed N] [--steps N] [--scale N] [--folder FOLDER]
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
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from spotkeeper.client.logs import log_data
from spotkeeper.client.lookup import view_of
from spotkeeper.client.pack import Source, pack
from spotkeeper.client.submit import submit
from spotkeeper.client.target import STACK, STACK_FILE, local_target, notify
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.parse.jobfile import read_job
from spotkeeper.contract.record import Hold, Outcome, Phase, Record
from spotkeeper.local import deploy
from spotkeeper.local.demo import proof
from spotkeeper.local.demo.chaos import REMEDY, Chaos, ChaosError, ticks
from spotkeeper.local.demo.proof import Watcher
from spotkeeper.local.deploy.result import Printer, summary
from spotkeeper.local.lifecycle.cloud import LeftOver, LocalCloud, force_cleanup
from spotkeeper.local.lifecycle.folder import BusyError, DamagedError, LocalCloudError, only_one
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.lines import event_line
from spotkeeper.report.job.recovery import preemptions
from spotkeeper.report.job.view import JobView, Site
from spotkeeper.report.text.render import live

ROOT = Path(__file__).resolve().parents[3]
JOB_FILE = ROOT / "examples" / "gpt" / "job.yaml"
FOLDER = Path(".spotkeeper") / "demo"
MARKER = ".spotkeeper-demo"  # a file in each folder that the demo made, and whose contents it may delete
STEPS = 700
STEP_S = 0.15  # least real seconds of a step: a fast machine would finish this small model before the last fault
SCALE = 12.0  # one minute of the cloud's time takes 5 s, a notice of 120 s takes 10 s
PER_ZONE = 8  # a zone's spot capacity while the recorded zone has capacity for its whole gang
CALM_S = 3600.0  # virtual; in this hour the market preempts nothing, only chaos does
WIDTH = 140  # of lines, if the output is a file
OTHER_FOLDER = "use another folder: make demo ARGS=--folder=.spotkeeper/second"
MAX_SCALE = 120.0  # a notice of 120 s is then one real second
INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell
END_S = 240.0  # real; time limit for the rest of the training, after the last fault


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=_whole(0), default=1, help="seed of the random faults")
    parser.add_argument("--steps", type=_whole(1), default=STEPS, help="optimizer steps of the job")
    parser.add_argument(
        "--scale", type=_factor, default=SCALE, help="how many times faster than real time the cloud's clock runs"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=FOLDER,
        help="folder of the cloud and the report: new, empty, or of an earlier demo, whose files are deleted first",
    )
    parser.add_argument("--engine", choices=("auto", "pulumi", "in-process"), default="auto")
    return parser.parse_args(argv)


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to 999999999")
        return int(text)

    return read


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor <= MAX_SCALE:  # also refuses nan
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, at most {MAX_SCALE:g}")
    return factor


def main(argv: list[str] | None = None) -> int:
    """Run the demo and return its exit code.

    0: all checks passed; 1: a check or the demo failed; 2: a bad argument, or the folder is not the demo's, or another
    demo uses it; 130: Ctrl-C.
    """
    args = parse(sys.argv[1:] if argv is None else argv)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    stop = StopSignal()
    stop.listen()
    try:
        check_folder(args.folder)
        with only_one(args.folder, "make demo", OTHER_FOLDER):
            return attempt(Demo(args, console, stop), console)
    except (BusyError, DemoError, OSError) as error:
        console.print(f"[bold red]the demo did not start:[/] {escape(str(error))}", highlight=False)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


class StopSignal:
    """Raises KeyboardInterrupt in the main thread, once, at Ctrl-C, SIGTERM, or a closed terminal.

    A library can swallow the exception (some catch everything during an import), so each step calls :meth:`check`.
    """

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        for end in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(end, self._heard)

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has asked the demo to stop."""
        if self.asked:
            raise KeyboardInterrupt

    def _heard(self, *_: object) -> None:
        first, self.asked = not self.asked, True  # a second signal must not interrupt the cleanup
        if first:
            raise KeyboardInterrupt


def attempt(demo: Demo, console: Console) -> int:
    """Run the demo, clean up however it ends, and return the exit code."""
    try:
        try:
            return demo.run()
        except KeyboardInterrupt:
            console.print("\n[bold]stopped; cleaning up[/]")
            return INTERRUPTED
        finally:
            demo.clean_up()
    except (ChaosError, DemoError, LocalCloudError, OSError, RuntimeError, deploy.DeployError) as error:
        console.print(f"\n[bold red]the demo failed:[/] {escape(str(error))}", highlight=False)
        return 1


class Screen:
    """Shows a live panel on a terminal, and elsewhere a line per event."""

    def __init__(self, console: Console, notes: list[str]) -> None:
        self._console = console
        self._notes = notes
        self._shown: set[str] = set()
        self._noted = 0

    def update(self, view: JobView, screen: Live | None) -> None:
        if screen is not None:
            notes = Text("\n".join(f"  chaos: {note}" for note in self._notes[-3:]), style="bold yellow")
            screen.update(Group(live(view, rows=12), notes), refresh=True)
            return
        for note in self._notes[self._noted :]:
            self._console.print(f"  chaos: {note}", style="bold yellow", highlight=False)
        self._noted = len(self._notes)
        for line in view.events:
            if line.id not in self._shown:
                self._shown.add(line.id)
                self._console.print(f"{event_line(line)}   (step {view.step or 0})", highlight=False)

    def last(self, view: JobView) -> None:
        """Print the last panel, so that it stays in the scrollback."""
        if self._console.is_terminal:
            self._console.print(live(view, rows=100))


class DemoError(Exception):
    """Raised if a step of the demo fails or times out."""


def check_folder(folder: Path) -> None:
    """Raise DemoError if ``folder`` has files that are not an earlier demo's: they would be deleted."""
    if folder.exists() and not folder.is_dir():
        raise DemoError(f"--folder {folder}: this is not a folder: {OTHER_FOLDER}")
    if folder.is_dir() and not (folder / MARKER).is_file() and any(folder.iterdir()):
        raise DemoError(
            f"--folder {folder}: the folder has files that are not an earlier demo's (it has no {MARKER}), and the "
            f"demo would delete them: {OTHER_FOLDER}"
        )


def clear(folder: Path) -> None:
    """Make ``folder``, or remove an earlier demo's files. Interrupted, it leaves the marker."""
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()


class Demo:
    """One run of the demo. ``clean_up`` can remove its resources at any time."""

    def __init__(self, args: argparse.Namespace, console: Console, stop: StopSignal) -> None:
        self.args = args
        self.stop = stop
        self.console = console
        self.folder: Path = args.folder.resolve()
        self.cloud: LocalCloud | None = None
        self.notes: list[str] = []

    def run(self) -> int:
        began = time.monotonic()
        cloud, engine = self.bring_up()
        self.say("submit a job: a byte-level GPT on one static machine and two spot machines")
        spec, source = self.job()
        store = local_target(cloud.folder).store()
        self.until("the static machine is up", lambda: bool(store.list_static_hellos()))
        job = self.submit(store, spec, source)
        with Watcher(cloud.folder / "vms", job) as watcher:
            self.train(cloud, store, job, watcher)
            record = self.outcome(store, job)
        weights = proof.weights_in(log_data(store, record, 0)[1].decode(errors="replace"))
        bill = cloud.bill().bill
        ledger = (*store.list_ledger(job), *record.outbox)
        left = self.destroy(cloud)
        self.say("repeat the same training undisturbed, under plain torchrun (takes about a minute)")
        with self.console.status("training"):
            alone = proof.left_alone(JOB_FILE.parent, self.training(), 3, dict(spec.env), self.folder / "alone")
        done = proof.DemoReport(
            steps=self.args.steps,
            generations=record.gen,
            preemptions=preemptions(ledger),
            recoveries=proof.recovered(watcher.traces(), ledger, cloud.clock),
            cost=proof.BilledCost(bill.spent, bill.on_demand_only, bill.on_demand_only - bill.spent),
            weights_identical=weights is not None and weights == alone,
            left_over=left,
            engine=engine,
        )
        done.write(self.folder / "report.json")
        proof.show(self.console, done, weights, time.monotonic() - began, self.folder / "report.json")
        return 0 if done.holds() else 1

    # -- the steps

    def bring_up(self) -> tuple[LocalCloud, str]:
        """Remove the cloud of an interrupted run, start a new one, and bring the stack up."""
        self._end_cloud()
        clear(self.folder)
        self.say(f"start a local cloud: three zones, a recorded spot market, a clock {self.args.scale:g} times as fast")
        self.cloud = cloud = LocalCloud.up(
            self.folder / "cloud", scale=self.args.scale, seed=self.args.seed, per_zone=PER_ZONE, calm_s=CALM_S
        )
        self.say("pulumi up: deploy a stack with the project's own Pulumi program")
        done = deploy.up(
            STACK, STACK_FILE, cloud, cloud.folder / "deploy", Printer(self.console), engine=self.args.engine
        )
        summary(done, self.console)
        return cloud, done.engine

    def job(self) -> tuple[JobSpec, Source]:
        spec = read_job(JOB_FILE, None, 0.0)
        # All VMs share this machine's cores: booting and saving get priority over training.
        command = (*self.training(), "--step-s", str(STEP_S), "--nice", "10")
        return replace(spec, command=command), pack(JOB_FILE.parent)

    def training(self) -> tuple[str, ...]:
        """The part of the job's command that determines the weights."""
        return ("train.py", "--steps", str(self.args.steps))

    def submit(self, store: Store, spec: JobSpec, source: Source) -> str:
        assert self.cloud is not None
        done = submit(store, spec, source, self.cloud.clock.now())
        notify(local_target(self.cloud.folder), store, done.job)
        return done.job

    def train(self, cloud: LocalCloud, store: Store, job: str, watcher: Watcher) -> None:
        """Cause faults in a thread and show the live view meanwhile."""

        def read() -> Record | None:
            held = store.read_record(job)
            return held.value if held else None

        rng = random.Random(self.args.seed)  # noqa: S311 - reproducible, not a secret
        chaos = Chaos(STACK, job, cloud, watcher, read, self.notes.append, rng)
        failure: list[Exception] = []
        done = threading.Event()
        thread = threading.Thread(target=_guarded, args=(chaos.run, failure, done), name="chaos", daemon=True)
        thread.start()
        self.watch(lambda: self.view(store, job, watcher), done, failure)

    def view(self, store: Store, job: str, watcher: Watcher) -> JobView:
        """Return what ``spotkeeper watch`` shows, but with the step that the watcher read last: it is newer."""
        assert self.cloud is not None
        held = store.read_record(job)
        assert held is not None
        clock = self.cloud.clock
        view = view_of(store, held.value, store.read_stack(), clock.now(), Site(clock.scale, local=True))
        return replace(view, step=watcher.step() or view.step, total_steps=self.args.steps)

    def watch(self, view: Callable[[], JobView], done: threading.Event, failure: list[Exception]) -> None:
        """Show the job until it ends; ChaosError if it does not recover, or ends too early or too late."""
        screen = Screen(self.console, self.notes)
        end = float("inf")
        with (
            Live(console=self.console, auto_refresh=False, transient=True)
            if self.console.is_terminal
            else nullcontext() as live
        ):
            while True:
                self.stop.check()
                now = view()
                screen.update(now, live)
                if failure:
                    raise failure[0]
                if now.stands():
                    break
                if done.is_set() and end == float("inf"):
                    end = time.monotonic() + END_S
                if time.monotonic() > end:
                    raise ChaosError(f"the job did not end within {END_S:.0f} s after the last fault")
                time.sleep(0.5)
        screen.last(now)
        if not done.wait(5):
            raise ChaosError(f"the job ended before the last fault. {REMEDY}")

    def outcome(self, store: Store, job: str) -> Record:
        """Return the record of the ended job; DemoError if the job failed or its machines and disks remain."""

        def done() -> bool:
            held = store.read_record(job)
            if held is not None and held.value.hold is Hold.FAILURE:
                raise DemoError(f"the job failed: {held.value.reason}")
            return held is not None and held.value.phase is Phase.DONE

        self.until("all machines and disks of the ended job are deleted", done)
        held = store.read_record(job)
        assert held is not None
        if held.value.outcome is not Outcome.SUCCEEDED:
            raise DemoError(f"the job {held.value.outcome}: {held.value.reason}")
        return held.value

    def destroy(self, cloud: LocalCloud) -> LeftOver:
        self.say("pulumi destroy")
        deploy.destroy(
            STACK, STACK_FILE, cloud, cloud.folder / "deploy", Printer(self.console), engine=self.args.engine
        )
        left = cloud.down(purge=True)
        self.cloud = None
        return left

    def clean_up(self) -> None:
        """Remove the cloud, if it exists; safe to call at any time."""
        self.stop.asked = True  # no more interrupts
        self._end_cloud()

    def _end_cloud(self) -> None:
        """End the cloud that the folder has; after an interrupted start it may run although ``self.cloud`` is None."""
        folder = self.folder / "cloud"
        if folder.is_dir():
            try:
                LocalCloud.attach(folder).down(purge=True)
            except DamagedError:
                force_cleanup(folder)
            except LocalCloudError:  # no cloud: it was interrupted before it had settings
                shutil.rmtree(folder)
        self.cloud = None

    def until(self, event: str, poll: Callable[[], bool], seconds: float = 60.0) -> None:
        """Call ``poll`` until it returns true; raise a DemoError that names ``event`` after ``seconds`` real s."""
        for _ in ticks(seconds):
            self.stop.check()
            if poll():
                return
        raise DemoError(f"timed out after {seconds:.0f} s, waiting until {event}")

    def say(self, text: str) -> None:
        self.stop.check()
        self.console.print(f"\n[bold cyan]==>[/] [bold]{text}[/]", highlight=False)


def _guarded(run: Callable[[], None], failure: list[Exception], done: threading.Event) -> None:
    try:
        run()
    except Exception as error:  # raised in the main thread
        failure.append(error)
    done.set()


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())

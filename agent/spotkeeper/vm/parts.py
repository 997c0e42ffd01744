"""What one machine's agent has to work with, built once and handed to those who use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spotkeeper.vm import identity
from spotkeeper.vm.disk import Disk
from spotkeeper.vm.events import Event
from spotkeeper.vm.helper import Helper
from spotkeeper.vm.identity import Door
from spotkeeper.vm.kept import Kept
from spotkeeper.vm.launch import Launcher
from spotkeeper.vm.logs import Uploader
from spotkeeper.vm.metadata import Metadata
from spotkeeper.vm.mirror import Mirroring
from spotkeeper.vm.mounting import Mounting
from spotkeeper.vm.output import Outputs
from spotkeeper.vm.ready import Ready
from spotkeeper.vm.secrets import Given
from spotkeeper.vm.settings import job_path, templates_path
from spotkeeper.vm.standing import Standing
from spotkeeper.vm.storage import Bucket
from spotkeeper.vm.supervisor import Supervisor
from spotkeeper.vm.upgrade import Bundles, Upgrade, own_folder


@dataclass(frozen=True)
class Parts:
    """All for the loop's thread; ``helper``, ``uploader``, output and mirror have threads of their own."""

    helper: Helper
    uploader: Uploader
    mounting: Mounting
    kept: Kept
    launcher: Launcher
    ready: Ready
    supervisor: Supervisor
    output: Outputs
    mirror: Mirroring
    upgrade: Upgrade
    door: Door | None
    given: Given

    @classmethod
    def of(cls, me: Standing, metadata: Metadata, post: Callable[[Event], None]) -> Parts:
        """Nothing is started yet. ``post``: where events go."""
        settings, clock, log = me.settings, me.clock, me.log
        bucket = Bucket(settings.storage, settings.bucket, metadata)
        helper = Helper(post, log)
        carrier = Helper(post, log, "output")  # its own: a mount must not wait for an upload
        copier = Helper(post, log, "mirror")  # its own, for it may take hours
        door = _door(me, metadata)
        launcher = Launcher(settings.run, job_path(), post, log)
        return cls(
            helper=helper,
            uploader=Uploader(bucket, clock, log),
            mounting=Mounting(Disk(settings.device, settings.mount, log), helper, me.say, clock, log),
            kept=Kept(),
            launcher=launcher,
            ready=Ready(settings, bucket, launcher, helper),
            supervisor=Supervisor(settings.run, templates_path(), launcher, log),
            output=Outputs(bucket, carrier, settings.mount, settings.state / "out", clock, log),
            mirror=Mirroring(bucket, copier, clock, log),
            upgrade=Upgrade(Bundles(settings.state / "bundle", own_folder()), bucket, helper, launcher, log),
            door=door,
            given=Given(door, helper, log),
        )

    def start(self) -> None:
        """The threads."""
        self.helper.start()
        self.output.helper.start()
        self.mirror.helper.start()
        self.uploader.start()
        if self.door is not None:
            self.door.start()


def _door(me: Standing, metadata: Metadata) -> Door | None:
    """Where the stack gives jobs an identity. A wrong one is told, and is none: the job says what it lacks."""
    name = me.settings.job_identity
    if not name:
        return None
    try:
        return Door(identity.of(name, metadata, me.clock, identity.Endpoints()), me.settings.run, me.log)
    except identity.IdentityError as error:
        me.log("identity.none", error=str(error))
        return None

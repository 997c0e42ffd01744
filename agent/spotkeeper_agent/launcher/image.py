"""Gets a job's container image, then starts the launcher, whose generations run in containers of that image.

::

    python -BS image.py RUN IMAGE PYTHON FOLDER...

``IMAGE`` names the image by its digest, and ``PYTHON`` is an interpreter in it. Each ``FOLDER`` has the same path in
the container. The image is pulled once per job and machine, into the job's ``HOME`` on the boot disk.

podman runs without root and with one user id: root in the container is the job's user outside. The container is not
what confines a job; the jobs' unit is. So it shares the machine's network, process ids, ``/tmp`` and ``/dev/shm``, and
its processes stay in the generation's cgroup: ends, signals, stack traces and the fence are as without an image.

``unshare`` makes the user namespace in podman's place: podman's own way maps more ids on machines that have them,
leaves a process behind, and returned 0 for a container that ended with another code on SIGTERM. A killed generation
leaves podman's files in disorder, so each one begins with empty ones beside the pulled images.

Runs as the job's user, under the agent's Python: standard library only.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BUILDING = "environment.building"  # as ``pyenv.py``: exists while the image is pulled
SECRETS = "SPOTKEEPER_SECRETS"  # as ``spool.py``
CONTAINER = "SPOTKEEPER_CONTAINER"  # variable of the launcher: a :class:`Container` as JSON
NEEDS = ("unshare", "podman", "conmon", "crun")
GOOGLES = re.compile(r"([a-z0-9-]+\.)+pkg\.dev\Z|([a-z0-9-]+\.)*gcr\.io\Z")  # they get the identity's token
TOKEN_S = 30.0  # real; the agent asks the cloud
SHARED = ("/tmp", "/dev/shm")  # noqa: S108 - as without an image: the unit has its own
CDI = ("/etc/cdi", "/var/run/cdi")
GPU, GPU_DRIVER = "nvidia.com/gpu", "/dev/nvidiactl"
# podman would read these for itself, so they reach the container by value, which every user of the machine can read.
# A secret never does.
_FOR_PODMAN = re.compile(
    r"(PATH|HOME|TMPDIR|GODEBUG|GOGC|GOMAXPROCS|REGISTRY_AUTH_FILE)\Z|LD_|XDG_|_?CONTAINERS_|STORAGE_"
)
_CONFIG = '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "none"\nlock_type = "file"\nruntime = "crun"\n'


class ImageError(Exception):
    """This machine cannot run the image. The message has the reason and a remedy."""


@dataclass(frozen=True)
class Container:
    """How to run a command in the job's image. ``state``: podman's folder, in the job's ``HOME``."""

    image: str
    python: str
    state: str
    folders: tuple[str, ...]

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Container | None:
        """Return the launcher's container; None if the job has no image."""
        return cls(**json.loads(env[CONTAINER])) if CONTAINER in env else None

    def pull(self) -> None:
        """Pull the image, if it is not there.

        Raises:
            ImageError: podman failed; it has printed why.
        """
        self._forget("pull")
        if self._run("image", "exists", self.image) == 0:
            return
        print(f"image: pulling {self.image}", flush=True)
        login = self._login()
        try:
            options = [f"--authfile=/proc/self/fd/{one}" for one in login]
            code = self._run("pull", *options, self.image, files=login)
        finally:
            for one in login:
                os.close(one)
        if code:
            raise ImageError(
                f"image: podman cannot pull {self.image} (code {code}, its last lines are above): this machine needs a "
                "way to the registry, the job's identity the right to read it, and the boot disk room"
            )

    def _login(self) -> list[int]:
        """Return a file with which the job's identity reads Google's registries; [] for all others.

        It is in memory and has no name, so the token is gone with the pull, however that ends.
        """
        import urllib.request  # not in every launcher

        host, at = self.image.partition("/")[0], os.environ.get("GCE_METADATA_HOST", "")
        if not at or not GOOGLES.match(host):
            return []
        url = f"http://{at}/computeMetadata/v1/instance/service-accounts/default/token"
        asked = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        try:
            with urllib.request.urlopen(asked, timeout=TOKEN_S) as answer:  # noqa: S310 - http
                token = json.load(answer)["access_token"]
        except (OSError, ValueError, KeyError) as error:
            raise ImageError(f"image: no token of the job's identity for {host}: {error}") from None
        auth = base64.b64encode(f"oauth2accesstoken:{token}".encode()).decode()
        file = os.memfd_create("auth.json")
        os.write(file, json.dumps({"auths": {host: {"auth": auth}}}).encode())
        return [file]

    def _run(self, *words: str, files: Sequence[int] = ()) -> int:
        command = self._podman("pull", *words)
        return subprocess.run(command, check=False, stdin=subprocess.DEVNULL, pass_fds=files).returncode

    def command(self, words: list[str], env: Mapping[str, str], cwd: str) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs Python with these arguments in a new container, and the command's environment.

        ``env``: the container's variables, in addition to the image's own. Their values are not in the command, which
        every user of the machine can read.
        """
        self._forget("run", "layers")
        env = {"HOME": os.environ["HOME"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **env}
        options = ["--network=host", "--pid=host", "--uts=host", "--cgroupns=host", "--ulimit=host"]
        options += ["--user=0:0", "--security-opt=seccomp=unconfined", "--security-opt=label=disable"]
        options += ["--pull=never", "--log-driver=none", "--entrypoint=", f"--workdir={cwd}", *devices()]
        # A disk that is attached later is mounted below one of these folders.
        options += [f"--volume={folder}:{folder}:rslave" for folder in (*self.folders, *SHARED)]
        secrets = env.get(SECRETS, "").split()
        by_value = {name for name in env if _FOR_PODMAN.match(name) and name not in secrets}
        options += [f"--env={name}={env[name]}" if name in by_value else f"--env={name}" for name in env]
        command = self._podman("run", "run", "--rm", *options, self.image, self.python, *words)
        return command, dict(os.environ) | {name: env[name] for name in env if name not in by_value}

    def _podman(self, name: str, *words: str) -> list[str]:
        """Return a podman command in a user namespace of its own: ``pull`` keeps its result, ``run`` nothing."""
        state = Path(self.state)
        images = state / "images"
        run = state / name  # podman takes at most 50 characters
        run.mkdir(parents=True, exist_ok=True)
        config = state / "containers.conf"
        config.write_text(_CONFIG)
        inside = {
            "_CONTAINERS_USERNS_CONFIGURED": "done",
            "_CONTAINERS_ROOTLESS_UID": str(os.getuid()),
            "_CONTAINERS_ROOTLESS_GID": str(os.getgid()),
            "CONTAINERS_CONF": str(config),
            "XDG_RUNTIME_DIR": str(run / "user"),
        }
        (run / "user").mkdir(exist_ok=True)
        options = ["--log-level=error", f"--runroot={run}", f"--tmpdir={run / 'tmp'}"]
        # One id: files of other users in the image belong to this user.
        options += ["--storage-driver=overlay", "--storage-opt=overlay.ignore_chown_errors=true"]
        if name == "run":
            options += [f"--root={state / 'layers'}", f"--storage-opt=overlay.imagestore={images}"]
        else:
            options += [f"--root={images}"]
        space = ["unshare", "--user", "--map-root-user", "--mount", "--propagation=slave"]
        return [*space, "env", *(f"{key}={value}" for key, value in inside.items()), "podman", *options, *words]

    def _forget(self, *names: str) -> None:
        """Delete what podman left: some folders in it have modes without rights."""
        for folder in (Path(self.state, name) for name in names):
            if folder.exists():
                subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=False, stderr=subprocess.DEVNULL)
                shutil.rmtree(folder, ignore_errors=True)


def devices() -> list[str]:
    """Return podman's options for the machine's GPUs and their fabric.

    Raises:
        ImageError: NVIDIA's driver is there, but nothing tells podman which of its files a container needs.
    """
    options: list[str] = []
    specs = [file for folder in CDI if Path(folder).is_dir() for file in Path(folder).iterdir()]
    if any(GPU in file.read_text(errors="replace") for file in specs if file.is_file()):
        options.append(f"--device={GPU}=all")
    elif Path(GPU_DRIVER).exists():
        raise ImageError(
            "image: no CDI specification of this machine's GPUs. Have the machine's image or its boot run "
            "`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` (NVIDIA Container Toolkit)"
        )
    if Path("/dev/infiniband").is_dir():
        options.append("--device=/dev/infiniband")
    return options


def main(run: Path, image: str, python: str, folders: list[str]) -> None:
    """Pull the image, and execute the launcher.

    Raises:
        ImageError: this machine cannot run the image.
    """
    if missing := [program for program in NEEDS if shutil.which(program) is None]:
        raise ImageError(
            f"image: this machine lacks {', '.join(missing)}: install podman and crun in the machines' image "
            "(docs/train.md, Container images), or leave `image` out of the job file"
        )
    devices()
    home = os.environ["HOME"]
    container = Container(image, python, str(Path(home, "image")), (*folders, home))
    building = run / BUILDING
    building.write_text(f"{image}\n")
    try:
        container.pull()
    finally:
        building.unlink(missing_ok=True)
    sys.stdout.flush()
    env = dict(os.environ) | {CONTAINER: json.dumps(asdict(container))}
    os.execve(sys.executable, [sys.executable, "-m", "spotkeeper_agent.launcher", "exec", str(run)], env)  # noqa: S606


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
    except (ImageError, OSError) as error:
        sys.exit(str(error))

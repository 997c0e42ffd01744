"""What a job is given besides its file: the variables of its identity, and its secrets, read as that identity.

A job file names secrets (``HF_TOKEN: gcp-secret://projects/p/secrets/hf/versions/latest``); their values exist in
this process and in the environment of the job's, nowhere else: they reach the launcher through its socket, and the
redaction filter knows them, so no log that leaves this machine has them.
"""

from __future__ import annotations

from collections.abc import Mapping

from spotkeeper.spec.redact import learn
from spotkeeper.vm.events import SecretsRead
from spotkeeper.vm.helper import Helper
from spotkeeper.vm.identity import Door, IdentityError
from spotkeeper.vm.log import Log

TRIES = 3  # a second apart; then the job is told, and its crash budget decides


class Given:
    """For the loop's thread. ``refused``: why the secrets cannot be had, after a few tries; "": nothing known."""

    def __init__(self, door: Door | None, helper: Helper, log: Log) -> None:
        self.refused = ""
        self._door = door
        self._helper = helper
        self._log = log
        self._values: dict[str, str] | None = None
        self._failed = 0

    def prepare(self, references: Mapping[str, str]) -> None:
        """Read what is not read yet; :class:`SecretsRead` follows. Called until all is there, and after."""
        if not references or self._values is not None or self.refused:
            return
        door = self._door
        if door is None:
            self.refused = "the job has secrets, but its stack gives jobs no identity to read them (job_identity)"
            return
        wanted = dict(references)
        self._helper.do("secrets", lambda: SecretsRead({name: _read(door, name, wanted[name]) for name in wanted}))

    def read(self, event: SecretsRead) -> None:
        self._helper.done("secrets")
        learn(event.values.values())
        self._values = dict(event.values)

    def failed(self, error: str) -> None:
        self._helper.done("secrets", error)
        self._failed += 1
        if self._failed >= TRIES:
            self.refused = error

    def environment(self, references: Mapping[str, str]) -> dict[str, str] | None:
        """The variables; None while secrets are not there."""
        if references and self._values is None:
            return None
        served = self._door.environment() if self._door is not None else {}
        return served | (self._values or {} if references else {})

    def again(self) -> None:
        """The next generation asks anew: somebody may have granted what was missing."""
        self.refused, self._failed = "", 0

    def forget_job(self) -> None:
        self._values = None
        self.again()


def _read(door: Door, name: str, reference: str) -> str:
    try:
        return door.identity.secret(reference)
    except IdentityError as error:
        raise IdentityError(f"secret {name}: {error}", final=error.final) from None

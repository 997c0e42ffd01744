"""How EC2 is called: until a moment, once, or once more under a token where the answer was lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from spotkeeper.reconcile.ec2_api import Api, Parsed, RefusedError
from spotkeeper.reconcile.ec2_errors import GONE, classify
from spotkeeper.reconcile.wire import NoAnswerError
from spotkeeper.spec.cloud import Class

log = logging.getLogger(__name__)


class Calls:
    """``ends``: of ``time.monotonic``.

    Raises (all):
        RefusedError, NoAnswerError: see ``Api.call``.
    """

    def __init__(self, api: Api) -> None:
        self._api = api

    def once(self, operation: str, query: Mapping[str, object], ends: float) -> Parsed:
        left = ends - time.monotonic()
        if left <= 0:
            raise NoAnswerError(f"{operation}: no time left")
        return self._api.call(operation, left, query)

    def again(self, operation: str, query: Mapping[str, object], ends: float) -> Parsed:
        """A call with a token. The first try has half of the time; EC2 tells the second what came of it."""
        half = (ends + time.monotonic()) / 2
        try:
            return self.once(operation, query, half)
        except NoAnswerError as error:
            log.warning("%s: %s; asked again under its token", operation, error)
        except RefusedError as error:
            if classify(error.code, error.status) is not Class.AMBIGUOUS:
                raise
            log.warning("%s: %s; asked again under its token", operation, error)
        return self.once(operation, query, ends)

    def gone(self, operation: str, query: Mapping[str, object], ends: float) -> tuple[Class, str]:
        """A deletion: what is not there is what was wanted."""
        try:
            self.once(operation, query, ends)
        except RefusedError as error:
            if error.code not in GONE:
                raise
            return Class.ACCEPTED, "was gone"
        return Class.ACCEPTED, ""

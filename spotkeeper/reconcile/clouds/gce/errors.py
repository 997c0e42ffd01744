"""Classify Compute Engine's refusals, from HTTP answers and from failed operations.

Google spells an error's name in two ways (``resourceInUseByAnotherResource`` in REST errors,
``RESOURCE_IN_USE_BY_ANOTHER_RESOURCE`` in operations), and answers HTTP 503 if a zone has no capacity. So the name
decides first and the HTTP status last.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec
from spotkeeper.contract.cloud import ResultKind


class ErrorInfo(Struct, frozen=True, rename="camel"):
    reason: str = ""


class ErrorDetail(Struct, frozen=True, rename="camel"):
    """A detail of an error: the reason is in ``errorInfo`` for an operation's error, in ``reason`` for a REST error."""

    reason: str = ""
    error_info: ErrorInfo = ErrorInfo()


class OneError(Struct, frozen=True, rename="camel"):
    code: str = ""  # operations
    reason: str = ""  # REST
    message: str = ""
    error_details: tuple[ErrorDetail, ...] = ()


class OperationErrors(Struct, frozen=True):
    errors: tuple[OneError, ...] = ()


class RestError(Struct, frozen=True):
    code: int = 0
    message: str = ""
    errors: tuple[OneError, ...] = ()
    details: tuple[ErrorDetail, ...] = ()


class Envelope(Struct, frozen=True):
    error: RestError = RestError()


# Normalised word -> class; the first word of the table that the answer contains decides.
WORDS: tuple[tuple[str, ResultKind], ...] = (
    ("zoneresourcepoolexhausted", ResultKind.CAPACITY),  # also ..._WITH_DETAILS
    ("resourcepoolexhausted", ResultKind.CAPACITY),
    ("stockout", ResultKind.CAPACITY),
    ("resourceavailability", ResultKind.CAPACITY),
    ("ratelimitexceeded", ResultKind.THROTTLED),
    ("userratelimitexceeded", ResultKind.THROTTLED),
    ("concurrentoperationsquotaexceeded", ResultKind.THROTTLED),
    ("operationratelimit", ResultKind.THROTTLED),
    ("quotaexceeded", ResultKind.QUOTA),
    ("limitexceeded", ResultKind.QUOTA),
    ("resourceinusebyanotherresource", ResultKind.IN_USE),
    ("resourceinuse", ResultKind.IN_USE),
    ("resourcenotready", ResultKind.IN_USE),
    ("resourceoperationinprogress", ResultKind.IN_USE),
    ("operationinprogress", ResultKind.IN_USE),
    ("internalerror", ResultKind.AMBIGUOUS),
    ("backenderror", ResultKind.AMBIGUOUS),
    ("servicenotavailable", ResultKind.AMBIGUOUS),
)
# Google has no code for a VM that was preempted before its insert ended.
_TAKEN = re.compile(r"(preempted|deleted) .*while it was being created|was preempted", re.IGNORECASE)
_AMBIGUOUS_STATUS = {401, 408, 412, 425}  # 401: the token expired on the way; the next call has a new token


def classify(status: int, errors: tuple[OneError, ...], details: tuple[ErrorDetail, ...] = ()) -> ResultKind:
    """Return the class of a refusal. ``status``: HTTP status, or the operation's ``httpErrorStatusCode`` (0: none)."""
    words = {_plain(word) for error in errors for word in _words(error)} | {_plain(d.reason) for d in details}
    for word, meaning in WORDS:
        if any(found.startswith(word) for found in words):
            return meaning
    if any(_TAKEN.search(error.message) for error in errors):
        return ResultKind.CAPACITY
    if status == 429:
        return ResultKind.THROTTLED
    if status >= 500 or status in _AMBIGUOUS_STATUS:
        return ResultKind.AMBIGUOUS
    return ResultKind.PERMANENT


def parse_error(status: int, body: bytes) -> tuple[ResultKind, str]:
    """Return the class and text of an HTTP error; a proxy's HTML page is classified by its status alone."""
    try:
        error = codec.decode(body, Envelope).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return classify(status, ()), f"HTTP {status} without an error object in the body"
    return classify(status, error.errors, error.details), detail_of(status, error.errors, error.message)


def detail_of(status: int, errors: tuple[OneError, ...], message: str = "") -> str:
    first = errors[0] if errors else OneError(message=message)
    word = first.code or first.reason
    text = " ".join(part for part in (f"HTTP {status}" if status else "", word, first.message or message) if part)
    return " ".join(text.split())[:300]


def _words(error: OneError) -> list[str]:
    details = (word for detail in error.error_details for word in (detail.reason, detail.error_info.reason))
    return [error.code, error.reason, *details]


def _plain(word: str) -> str:
    return re.sub(r"[^a-z]", "", word.lower())

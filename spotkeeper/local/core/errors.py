"""Errors in Google's exact format: an exception for refused requests, one for failed operations, a function per kind.

Format: https://cloud.google.com/compute/docs/reference/rest/v1 (the envelope that every client parses).
"""

from __future__ import annotations

from spotkeeper.local.core.schema import ErrorDetail, ErrorInfo, JsonObject, OperationError, OperationErrors


class ApiError(Exception):
    """Raised to refuse a request. ``code``: the HTTP status; ``reason``: Google's word for the kind of error."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message

    def body(self) -> JsonObject:
        entry: JsonObject = {"message": self.message, "domain": "global", "reason": self.reason}
        return {"error": {"code": self.code, "message": self.message, "errors": [entry]}}


class FailedOperationError(Exception):
    """Raised to fail an accepted operation; the client finds the error in the operation's ``error``."""

    def __init__(self, status: int, code: str, message: str, details: list[ErrorDetail] | None = None) -> None:
        super().__init__(message)
        self.error = OperationErrors([OperationError(code, message, details)])
        self.status = status


def not_found(path: str) -> ApiError:
    return ApiError(404, "notFound", f"The resource '{path}' was not found")


def already_exists(path: str) -> ApiError:
    return ApiError(409, "alreadyExists", f"The resource '{path}' already exists")


def invalid(field: str, value: object, why: str) -> ApiError:
    return ApiError(400, "invalid", f"Invalid value for field '{field}': '{value}'. {why}")


def required(field: str) -> ApiError:
    return ApiError(400, "required", f"Required field '{field}' not specified")


def in_use(path: str, user: str) -> ApiError:
    """Return the refusal of a request for the resource ``path``, since ``user`` uses it.

    An operation that was accepted earlier fails with :func:`failed_in_use` instead.
    """
    message = f"The resource '{path}' is already being used by '{user}'"
    return ApiError(400, "resourceInUseByAnotherResource", message)


def not_ready(path: str) -> ApiError:
    return ApiError(400, "resourceNotReady", f"The resource '{path}' is not ready")


def stale_fingerprint() -> ApiError:
    return ApiError(412, "conditionNotMet", "Supplied fingerprint does not match current metadata fingerprint.")


def quota_exceeded(metric: str, limit: float, place: str) -> ApiError:
    return ApiError(403, "quotaExceeded", f"Quota '{metric}' exceeded.  Limit: {limit:.1f} in {place}.")


def forbidden(message: str) -> ApiError:
    return ApiError(403, "forbidden", message)


def zone_down(zone: str) -> ApiError:
    return ApiError(503, "backendError", f"Backend error: zone '{zone}' does not answer. Please try again later.")


def not_built(feature: str) -> ApiError:
    """The refusal (501) of a feature of Google Cloud that this cloud lacks; ``feature``: a clause that names it."""
    message = f"{feature}; spotkeeper/local/ shows what the one-machine cloud supports."
    return ApiError(501, "notImplemented", message)


def stockout(project: str, zone: str) -> FailedOperationError:
    """The failure of an insert in a zone without capacity.

    As on Compute Engine, the operation has this error, with HTTP status 503, some seconds before it is DONE.
    """
    message = (
        f"The zone 'projects/{project}/zones/{zone}' does not have enough resources available to fulfill the request.  "
        "Try a different zone, or try again later."
    )
    details = [ErrorDetail(ErrorInfo("compute.googleapis.com", {"zone": zone}, "stockout"))]
    return FailedOperationError(503, "ZONE_RESOURCE_POOL_EXHAUSTED", message, details)


def failed_in_use(path: str, user: str) -> FailedOperationError:
    message = f"The disk resource '{path}' is already being used by '{user}'"
    return FailedOperationError(400, "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", message)


def failed_not_found(path: str) -> FailedOperationError:
    return FailedOperationError(404, "RESOURCE_NOT_FOUND", f"The resource '{path}' was not found")


def failed_preempted_while_created(path: str) -> FailedOperationError:
    """The failure of an insert whose VM was preempted or deleted before the insert ended, as on Compute Engine."""
    message = f"Instance '{path}' was preempted or deleted while it was being created"
    return FailedOperationError(400, "UNSUPPORTED_OPERATION", message)


def failed_internal(detail: str) -> FailedOperationError:
    message = f"Internal error. Please try again or contact support. ({detail})"
    return FailedOperationError(500, "INTERNAL_ERROR", message)

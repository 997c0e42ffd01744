"""Answers of a cloud that says no, in Google's exact shape. One class; a function per kind of refusal.

Shapes: https://cloud.google.com/compute/docs/reference/rest/v1 (the envelope every client parses).
"""

from __future__ import annotations

from spotkeeper.local.wire import ErrorDetail, ErrorInfo, OperationError, OperationErrors


class ApiError(Exception):
    """Ends a request. ``code`` is the HTTP status, ``reason`` what clients switch on."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message

    def body(self) -> dict[str, object]:
        entry = {"message": self.message, "domain": "global", "reason": self.reason}
        return {"error": {"code": self.code, "message": self.message, "errors": [entry]}}


class FailedOperationError(Exception):
    """Ends an operation that was accepted: the caller finds it in the operation's ``error``."""

    def __init__(self, error: OperationErrors, status: int) -> None:
        super().__init__(error.errors[0].message)
        self.error = error
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
    """The REST spelling; an operation that fails for it says RESOURCE_IN_USE_BY_ANOTHER_RESOURCE."""
    message = f"The resource '{path}' is already being used by '{user}'"
    return ApiError(400, "resourceInUseByAnotherResource", message)


def not_ready(path: str) -> ApiError:
    return ApiError(400, "resourceNotReady", f"The resource '{path}' is not ready")


def stale_fingerprint() -> ApiError:
    message = "Supplied fingerprint does not match current metadata fingerprint."
    return ApiError(412, "conditionNotMet", message)


def quota_exceeded(metric: str, limit: float, place: str) -> ApiError:
    return ApiError(403, "quotaExceeded", f"Quota '{metric}' exceeded.  Limit: {limit:.1f} in {place}.")


def forbidden(message: str) -> ApiError:
    return ApiError(403, "forbidden", message)


def zone_down(zone: str) -> ApiError:
    message = f"Backend error: zone '{zone}' does not answer. Please try again later."
    return ApiError(503, "backendError", message)


def not_built(what: str) -> ApiError:
    """What Google has and this stand-in has not. It never guesses."""
    message = f"{what} is not built into the one-machine cloud, which does not guess. See docs/design.md."
    return ApiError(501, "notImplemented", message)


def stockout(project: str, zone: str) -> FailedOperationError:
    """As GCE reports it: in the operation, visible while that still runs, HTTP 503 inside."""
    place = f"projects/{project}/zones/{zone}"
    message = f"The zone '{place}' does not have enough resources available to fulfill the request.  "
    error = OperationError(
        code="ZONE_RESOURCE_POOL_EXHAUSTED",
        message=message + "Try a different zone, or try again later.",
        error_details=[ErrorDetail(ErrorInfo("compute.googleapis.com", {"zone": zone}, "stockout"))],
    )
    return FailedOperationError(OperationErrors([error]), 503)


def failed_in_use(path: str, user: str) -> FailedOperationError:
    message = f"The disk resource '{path}' is already being used by '{user}'"
    error = OperationError(code="RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", message=message)
    return FailedOperationError(OperationErrors([error]), 400)


def failed_not_found(path: str) -> FailedOperationError:
    error = OperationError(code="RESOURCE_NOT_FOUND", message=f"The resource '{path}' was not found")
    return FailedOperationError(OperationErrors([error]), 404)


def failed_preempted_while_created(path: str) -> FailedOperationError:
    """Seen in the field when a VM is taken before its insert has ended."""
    message = f"Instance '{path}' was preempted or deleted while it was being created"
    return FailedOperationError(OperationErrors([OperationError(code="UNSUPPORTED_OPERATION", message=message)]), 400)


def failed_internal(detail: str) -> FailedOperationError:
    message = f"Internal error. Please try again or contact support. ({detail})"
    return FailedOperationError(OperationErrors([OperationError(code="INTERNAL_ERROR", message=message)]), 500)

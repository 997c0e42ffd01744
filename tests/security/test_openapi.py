"""The function against its own OpenAPI file, by schemathesis; and what every path says to a wrong method or size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flask
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings

from spotkeeper.reconcile.service.openapi import FILE, text
from tests.security.site import JOB, REFUSALS, Shot, Site

API = json.loads(FILE.read_text())
PATHS = {path: next(m for m in item if m != "parameters").upper() for path, item in API["paths"].items()}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "X" * 40)


def test_the_file_is_current() -> None:
    assert FILE.read_text() == text(), "python -m spotkeeper.reconcile.service.openapi"


@pytest.fixture(scope="module")
def app(site: Site) -> Iterator[Callable[[dict[str, Any], Any], Iterable[bytes]]]:
    """The site as a WSGI application, as the framework wraps it."""

    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        answered = site.app.handle(flask.Request(environ))
        site.put_back()
        return flask.Response(answered[0], answered[1], answered[2])(environ, start)

    yield app


def token_for(site: Site, path: str) -> str:
    return site.token() if path == "/v1/sync" else site.clock_token()


# Nothing that GET /v1/health could be sent is wrong.
@pytest.mark.parametrize(
    ("path", "valid"), [*((path, True) for path in PATHS), *((path, False) for path in PATHS if PATHS[path] == "POST")]
)
def test_every_answer_conforms_to_the_file(path: str, valid: bool, site: Site, app: Any) -> None:
    """Status, content type and shape of every answer are those of the file; what does not fit is refused."""
    import schemathesis  # here: it takes more than a second, in each process that collects this file
    from schemathesis.checks import CHECKS
    from schemathesis.generation import GenerationMode

    operation = schemathesis.openapi.from_dict(API)[path][PATHS[path]]
    authorized = {"Authorization": token_for(site, path)}
    # Tokens are tried in the table; and a JSON Schema takes 1.0 for a whole number, which we do not.
    elsewhere = [CHECKS.get_one("ignored_auth"), CHECKS.get_one("positive_data_acceptance")]

    @given(operation.as_strategy(GenerationMode.POSITIVE if valid else GenerationMode.NEGATIVE))
    @settings(max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def conforms(case: schemathesis.Case) -> None:
        response = case.call(app=app, headers=authorized, base_url="http://function.example")
        case.validate_response(response, excluded_checks=elsewhere)
        assert response.status_code != 500

    conforms()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", METHODS)
def test_methods(site: Site, path: str, method: str) -> None:
    """One method a path; any other is 405 and hears which."""
    path = path.format(job=JOB, channel="none") if "{" in path else path
    wanted = PATHS.get(path, "POST")
    if method == wanted:
        return
    shot = Shot(b"{}", token_for(site, path), path, method=method, want=(405,))
    status, body, headers = site.ask(shot)
    assert (status, headers.get("Allow"), REFUSALS[body]) == (405, wanted, 405)
    site.fire(shot)


@pytest.mark.parametrize("path", [path for path, method in PATHS.items() if method == "POST"])
@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b" " * 16_385, {}, 413),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"{}", {"Content-Encoding": "gzip"}, 415),
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b'{"unknown": 1}', {}, 400),
    ],
)
def test_types_and_sizes(site: Site, path: str, body: bytes, headers: dict[str, str], status: int) -> None:
    path = path.format(job=JOB, channel="none") if "{" in path else path
    # What a push says and cannot be read is set aside and answered well: refused, it would come back for days.
    want = 200 if path == "/v1/event" and status == 400 else status
    site.fire(Shot(body, token_for(site, path), path, headers=headers, want=(want,), quarantine=want == 200))


def test_the_file_is_an_openapi_file_with_whole_schemas() -> None:
    for name, one in API["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(one), name
    named = {"/v1/notify/{job}", "/v1/channels/{channel}/test"}
    assert set(PATHS) == {"/v1/sync", "/v1/tick", "/v1/event", "/v1/health", *named}

"""People and pipelines reach the bucket as they are logged in: what obstore finds by itself is left to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.reconcile.store import credentials
from spotkeeper.reconcile.store.objects import BucketRefusedError, UnavailableError
from spotkeeper.reconcile.store.objects_obstore import open_bucket

SSO = "[default]\nsso_session = my\nsso_account_id = 123456789012\nsso_role_name = x\n"
SESSION = "[sso-session my]\nsso_region = us-east-1\nsso_start_url = https://example.com/start\n"


class Seen(HTTPServer):
    """Notes who asked, and answers what it is told to: path -> body."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.says: dict[str, Any] = {}
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Seen

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.path, self.headers.get("Authorization", "")))
        says = self.server.says
        body = json.dumps(says[self.path]).encode() if self.path in says else b"<ErrorResponse/>"
        self.send_response(200 if self.path in self.server.says else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _answer

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def there() -> Iterator[Seen]:
    with Seen() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shell in which nobody is logged in, on no machine of a cloud; the folder of its settings."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION",
                 "AWS_DEFAULT_REGION", "AWS_LAMBDA_FUNCTION_NAME", "GOOGLE_APPLICATION_CREDENTIALS"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    return tmp_path


@pytest.mark.parametrize("variable", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_an_aws_profile_gives_keys_and_region(
    there: Seen, nobody: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    (nobody / "config").write_text("[profile team]\nregion = eu-west-1\n")
    (nobody / "credentials").write_text("[team]\naws_access_key_id = AKIATEAM\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_PROFILE", "team")
    with pytest.raises(BucketRefusedError):
        open_bucket("s3://b", there.url).get("a")
    ((_, signed),) = there.asked[:1]
    assert "Credential=AKIATEAM/" in signed and "/eu-west-1/s3/" in signed
    monkeypatch.setenv(variable, "eu-north-1")  # which obstore reads by itself
    assert credentials.s3()[0] is None


@pytest.mark.parametrize(
    ("config", "told"),
    [("", "not logged in: run `aws sso login`"), (SSO + SESSION, "Error loading SSO Token"), (SSO, "sso-session")],
    ids=["nothing", "a session that has ended", "half a configuration"],
)
def test_a_missing_login_is_reported_before_any_request(nobody: Path, config: str, told: str) -> None:
    (nobody / "config").write_text(config)
    with pytest.raises(credentials.LoginError) as caught:
        open_bucket("s3://b", "http://127.0.0.1:9")
    assert told in str(caught.value) and "`aws sso login`" in str(caught.value)


def test_a_refused_role_says_that_its_session_needs_the_submitters_name(
    there: Seen, nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = "role_arn = arn:aws:iam::123456789012:role/sk-demo-sb\nsource_profile = me\nregion = eu-west-1\n"
    (nobody / "config").write_text(f"[profile train]\n{role}")
    (nobody / "credentials").write_text("[me]\naws_access_key_id = AKIAME\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_PROFILE", "train")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", there.url)
    with pytest.raises(credentials.LoginError, match=r"AssumeRole operation.*`role_session_name`"):
        open_bucket("s3://b", there.url)
    assert there.asked


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_LAMBDA_FUNCTION_NAME"])
def test_obstore_finds_environment_and_machine_keys_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    assert credentials.s3() == (None, None)
    monkeypatch.setenv("SPOTKEEPER_BUCKET_REGION", "us-east-1")  # the function is in another one
    assert credentials.s3() == ("us-east-1", None)


@pytest.mark.parametrize("kind", ["service_account", "authorized_user", "", None])
def test_obstore_reads_googles_service_account_files_itself(nobody: Path, kind: str | None) -> None:
    assert credentials.gcs() is None
    (nobody / "gcloud").mkdir()
    file = nobody / "gcloud" / "application_default_credentials.json"
    file.write_text(json.dumps({"type": kind}) if kind else "no JSON" if kind is None else "{}")
    assert credentials.google_file() == file and credentials.gcs() is None


def test_a_pipelines_credentials_of_google_are_exchanged_for_a_token(
    there: Seen, nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = nobody / "gha-creds-1.json"
    file.write_text(
        json.dumps({
            "type": "external_account",
            "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/g",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": f"{there.url}/token",
            "credential_source": {
                "url": f"{there.url}/oidc", "headers": {"Authorization": "Bearer of-the-job"},
                "format": {"type": "json", "subject_token_field_name": "value"},
            },
        })
    )  # fmt: skip
    there.says = {
        "/oidc": {"value": "a.b.c"},
        "/token": {
            "access_token": "ya29.x", "expires_in": 3600, "token_type": "Bearer",
            "issued_token_type": "urn:ietf:params:oauth:token-type:access_token",
        },
    }  # fmt: skip
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    give = credentials.gcs()
    assert give is not None
    given = give()
    assert given["token"].startswith("ya29.") and given["expires_at"] is not None
    assert given["expires_at"].tzinfo is not None
    assert ("/oidc", "Bearer of-the-job") in there.asked
    open_bucket("gs://b")  # obstore by itself refuses such a file
    del there.says["/token"]
    with pytest.raises(credentials.LoginError, match="gcloud auth application-default login"):
        open_bucket("gs://b")


def test_without_the_clouds_library_obstore_is_used(monkeypatch: pytest.MonkeyPatch, nobody: Path) -> None:
    for name in ("botocore.session", "botocore.exceptions", "google.auth"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    file = nobody / "x.json"
    file.write_text(json.dumps({"type": "external_account"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    assert credentials.s3() == (None, None) and credentials.gcs() is None
    with pytest.raises(UnavailableError):
        open_bucket("s3://b", "http://127.0.0.1:9").get("a")


def test_without_settings_googles_file_is_below_the_home_folder(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOUDSDK_CONFIG")
    monkeypatch.setenv("HOME", str(nobody))
    assert credentials.google_file() is None
    file = nobody / ".config" / "gcloud" / "application_default_credentials.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    assert credentials.google_file() == file
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/elsewhere.json")
    assert credentials.google_file() == Path("/elsewhere.json"), "which may be missing: then its reader says so"

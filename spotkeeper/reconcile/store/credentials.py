"""Finds credentials of users and pipelines that obstore does not find by itself. The function needs none of them.

obstore finds the credentials of machines: keys in the environment, the metadata server, a service account's file. It
does not read ``~/.aws`` (profiles, `aws sso login`), nor Google's files for pipelines (OIDC) and impersonated accounts.
For these the cloud's own library is used, if it is installed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from obstore import GCSCredential, S3Credential

AGAIN = timedelta(minutes=5)  # after this time the library is asked for newer keys
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_OF_OBSTORE = frozenset({"service_account", "authorized_user"})  # kinds of Google's files that obstore reads


class LoginError(ValueError):
    """No usable login was found. The message says what to do."""


def s3() -> tuple[str | None, Callable[[], S3Credential] | None]:
    """Return the region and a provider of keys for S3; each is None if obstore finds it itself.

    Raises:
        LoginError: no keys were found, or their session has expired.
    """
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_LAMBDA_FUNCTION_NAME" in os.environ:
        return os.environ.get("SPOTKEEPER_BUCKET_REGION") or None, None
    try:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.session import get_session
    except ImportError:
        return None, None

    session = get_session()

    def keys() -> S3Credential:
        try:
            found = session.get_credentials()
            now = found.get_frozen_credentials() if found is not None else None
        except BotoCoreError as error:
            raise LoginError(f"AWS: {error}: run `aws sso login`, or choose another profile (AWS_PROFILE)") from None
        except ClientError as error:
            told = "a submitter's profile needs `role_session_name` with the submitter's name (docs/permissions.md)"
            raise LoginError(f"AWS: {error}: {told}") from None
        if now is None:
            raise LoginError("AWS: not logged in: run `aws sso login`, or choose a profile (AWS_PROFILE)")
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(timezone.utc) + AGAIN,
        }

    keys()  # fails here with a clear message: obstore would only report a refusal
    named = "AWS_REGION" in os.environ or "AWS_DEFAULT_REGION" in os.environ
    return None if named else session.get_config_variable("region"), keys


def gcs() -> Callable[[], GCSCredential] | None:
    """Return a provider of tokens for Cloud Storage; None if obstore finds them itself.

    Raises:
        LoginError: Google gives no token for these credentials.
    """
    file = google_file()
    if file is None or _kind(file) in _OF_OBSTORE:
        return None
    try:
        from google.auth import default
        from google.auth.credentials import with_scopes_if_required
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import Request
    except ImportError:
        return None

    logging.getLogger("google.auth").setLevel(logging.ERROR)  # it warns about a default project: not needed
    known: list[Any] = []  # the credentials, once they are read

    def token() -> GCSCredential:
        try:
            # Scopes are set later: with scopes the library would look up the project here, which needs another API.
            known[:] = known or [with_scopes_if_required(default()[0], [SCOPE])]  # type: ignore[no-untyped-call]
            known[0].refresh(Request())
        except GoogleAuthError as error:
            raise LoginError(f"{file}: {error}: run `gcloud auth application-default login`") from None
        ends: datetime | None = known[0].expiry  # google-auth's time is in UTC, without a time zone
        return {"token": known[0].token, "expires_at": ends and ends.replace(tzinfo=timezone.utc)}

    token()  # fails here with a clear message
    return token


def google_file() -> Path | None:
    """Return the file of Google's credentials: the one that the environment names, otherwise gcloud's default."""
    if given := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return Path(given)
    folder = os.environ.get("CLOUDSDK_CONFIG")
    found = (Path(folder) if folder else Path.home() / ".config" / "gcloud") / "application_default_credentials.json"
    return found if found.is_file() else None


def _kind(file: Path) -> str:
    """Return the ``type`` in the credentials file.

    An unreadable file counts as a service account's: obstore then reads the file too, and its error gives the reason.
    """
    try:
        return str(json.loads(file.read_bytes())["type"])
    except (OSError, ValueError, LookupError, TypeError):
        return "service_account"

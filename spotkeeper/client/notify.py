"""Notify the function that a job has news, so that it does not wait for the next tick.

The tick finds the same news within a minute, so a failed notification raises nothing and soon returns False.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time

from spotkeeper.client.target import Target, local_token

TIMEOUTS_S = (5.0, 2.0)  # to connect, and to answer; a round may take longer and continues without the caller
BODY, JSON = b"{}", {"Content-Type": "application/json"}
TOKEN = "SPOTKEEPER_TOKEN"  # noqa: S105 - the name of a variable


def notify(target: Target, job: str) -> bool:
    """Request a round of one job; return False if the function was not reached or refused the caller."""
    state = None if target.function_url else target.store().read_stack()
    root = target.function_url or (state.function_url if state else "")
    url = f"{root.rstrip('/')}/v1/notify/{job}"
    sign = state is not None and state.cloud == "aws" and not os.environ.get(TOKEN)
    headers = _signed(url, state.region) if state is not None and sign else _bearer(target, root)
    if not root or not headers:
        return False
    import requests

    try:
        answer = requests.post(url, headers=headers, data=BODY, timeout=TIMEOUTS_S)
    except requests.ReadTimeout:
        return True  # the round is under way
    except requests.RequestException:
        return False
    return answer.ok


def _bearer(target: Target, root: str) -> dict[str, str]:
    """Return headers with an identity token, which the function checks; {} if none can be had."""
    token = identity_token(target, root) if root else ""
    bearer = f"Bearer {token}"
    return {"Authorization": bearer, "X-Serverless-Authorization": bearer, **JSON} if token else {}


def _signed(url: str, region: str) -> dict[str, str]:
    """Return headers with a signature, which IAM checks before the function runs; {} without AWS credentials."""
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import get_session
    except ImportError:
        return {}
    from spotkeeper_agent.cloud.sigv4 import Credentials, Scope, sign

    try:
        found = get_session().get_credentials()
        now = found.get_frozen_credentials() if found is not None else None
    except BotoCoreError:
        return {}
    if now is None:
        return {}
    keys = Credentials(now.access_key, now.secret_key, now.token or "")
    return sign(keys, Scope(region, "lambda"), "POST", url, JSON, hashlib.sha256(BODY).hexdigest(), time.time())


def identity_token(target: Target, url: str) -> str:
    """Return a token for the function, from ``SPOTKEEPER_TOKEN``, the local cloud or gcloud; "" without one."""
    given = os.environ.get(TOKEN, "")
    if given:
        return given
    if target.local is not None:
        return local_token(target, url)
    try:
        done = subprocess.run(
            ["gcloud", "auth", "print-identity-token"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""Tells the function that a job has news, so that nobody waits for the next tick.

A poke is a courtesy: the tick finds the same news a minute later. So it fails quietly,
after a short time, and only says that it failed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time

from spotkeeper.cli.target import Target

TIMEOUT_S = 10.0  # a cold function answers in 2 s; its round may take longer, but it goes on without us
BODY, JSON = b"{}", {"Content-Type": "application/json"}
TOKEN = "SPOTKEEPER_TOKEN"  # noqa: S105 - the name of a variable


def poke(target: Target, job: str) -> bool:
    """Ask for a round of one job. False: not reached, or it would not take our word."""
    state = None if target.function_url else target.store().read_stack()
    root = target.function_url or (state.function_url if state else "")
    url = f"{root.rstrip('/')}/v1/poke/{job}"
    of_aws = state is not None and state.cloud == "aws" and not os.environ.get(TOKEN)
    headers = _signed(url, state.region) if state is not None and of_aws else _borne(target, root)
    if not root or not headers:
        return False
    import requests

    try:
        answer = requests.post(url, headers=headers, data=BODY, timeout=TIMEOUT_S)
    except requests.ReadTimeout:
        return True  # it works on it
    except requests.RequestException:
        return False
    return answer.ok


def _borne(target: Target, root: str) -> dict[str, str]:
    """Headers with a token of identity, which the function looks at; {} where there is none."""
    token = identity_token(target, root) if root else ""
    bearer = f"Bearer {token}"
    return {"Authorization": bearer, "X-Serverless-Authorization": bearer, **JSON} if token else {}


def _signed(url: str, region: str) -> dict[str, str]:
    """Headers with a signature, which IAM looks at before the function runs; {} where nobody is logged in."""
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import get_session
    except ImportError:
        return {}
    from spotkeeper.vm.sigv4 import Credentials, Scope, sign

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
    """A token for the function: the one given, the local cloud's, or gcloud's; "" where there is none."""
    given = os.environ.get(TOKEN, "")
    if given:
        return given
    if target.local is not None:
        from spotkeeper.cli.localcloud import local_token

        return local_token(target, url)
    try:
        done = subprocess.run(
            ["gcloud", "auth", "print-identity-token"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

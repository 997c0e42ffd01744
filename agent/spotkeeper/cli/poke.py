"""Tells the function that a job has news, so that nobody waits for the next tick.

A poke is a courtesy: the tick finds the same news a minute later. So it fails quietly,
after a short time, and only says that it failed.
"""

from __future__ import annotations

import os
import subprocess

from spotkeeper.cli.target import Target

TIMEOUT_S = 10.0  # a cold function answers in 2 s; its round may take longer, but it goes on without us
TOKEN = "SPOTKEEPER_TOKEN"  # noqa: S105 - the name of a variable


def poke(target: Target, job: str) -> bool:
    """Ask for a round of one job. False: not reached, or it would not take our word."""
    url = target.function_url or _url_of_stack(target)
    token = identity_token(target, url) if url else ""
    if not url or not token:
        return False
    import requests

    try:
        answer = requests.post(
            f"{url.rstrip('/')}/v1/poke/{job}",
            headers={"Authorization": f"Bearer {token}", "X-Serverless-Authorization": f"Bearer {token}"},
            json={},
            timeout=TIMEOUT_S,
        )
    except requests.ReadTimeout:
        return True  # it works on it
    except requests.RequestException:
        return False
    return answer.ok


def _url_of_stack(target: Target) -> str:
    state = target.store().read_stack()
    return state.function_url if state else ""


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

"""The script of ``live-check``'s temporary job.

It requests the machine's token from the metadata server, which must refuse, prints the result as one line of JSON, and
trains and saves until it is cancelled.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

MARK = "live-check: "
METADATA = "http://169.254.169.254"
GCE_TOKEN = "/computeMetadata/v1/instance/service-accounts/default/token"  # noqa: S105 - a path
EC2_TOKEN = "/latest/api/token"  # noqa: S105
STEP_S = 0.2
STEPS = 100_000  # hours: it is cancelled long before


def ask(path: str, method: str, header: tuple[str, str]) -> str:
    """Request a token from the metadata server; return "given" if the server answers with one, else the failure."""
    request = urllib.request.Request(METADATA + path, method=method, headers=dict([header]))  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5.0) as answer:
            return "given" if answer.status == 200 and answer.read(1) else f"status {answer.status}"
    except urllib.error.HTTPError as error:
        return f"status {error.code}"  # the metadata server of another cloud
    except OSError as error:
        return f"refused: {getattr(error, 'reason', error)}"


def main() -> None:
    import torch

    import spotkeeper

    tokens = [
        ask(GCE_TOKEN, "GET", ("Metadata-Flavor", "Google")),
        ask(EC2_TOKEN, "PUT", ("X-aws-ec2-metadata-token-ttl-seconds", "60")),
    ]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = spotkeeper.attach(model=model, optimizer=optimizer)
    print(MARK + json.dumps({"tokens": tokens, "torch": torch.__version__, "devices": devices}), flush=True)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(STEPS, 8)), batch_size=1)
    for (batch,) in run.steps(loader, epochs=1):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()

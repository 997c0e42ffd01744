"""Write what the local stack declares: ``python -m tests.infra.gcp.golden``, then review the difference."""

from spotkeeper.local.deploy.config import read_config
from tests.infra.conftest import STACKS, run_program
from tests.infra.gcp.test_declared import GOLDEN

if __name__ == "__main__":
    found = run_program("local", read_config(STACKS / "Pulumi.local.yaml", endpoint="http://127.0.0.1:9"))
    GOLDEN.write_text("".join(f"{key}\n" for key in sorted(found)))

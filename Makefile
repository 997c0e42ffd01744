# make demo | test | quick | mutants | engine | adapters | model | soak | crash | ec2 | stories | burst | lifecycle | recovery | features | bench | gpu | lint | types | setup | lock | clean
#
# Everything is installed into .venv of this checkout, from requirements.lock, which has a
# hash for every file and no address: pip's or uv's own settings say where packages come from.

PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: help demo test quick mutants engine adapters model soak crash ec2 stories burst lifecycle recovery features security bench gpu lint types lock setup operator clean

help:
	@echo "make demo   the main job on a cloud in one machine: trains while machines are taken away (ARGS=--seed=7)"
	@echo "make test   all tests (ARGS='-k decide' for some)"
	@echo "make quick  unit tests and one short life cycle, in at most 90 s on two idle cores"
	@echo "make engine  both clouds' stacks through Pulumi's own engine, with strict stand-ins for their providers, and"
	@echo "            with Google's own against the one-machine cloud, where each is installed; gcloud; bundles for all Pythons"
	@echo "make adapters  the callbacks, with the real Lightning and transformers (in .venv-adapters, beside .venv)"
	@echo "make model  every state of small worlds, and every rule taken away in turn; writes .spotkeeper/model.json"
	@echo "make mutants  small faults put into the code, each against the tests that reach it (ARGS='--seed 1 --sample 60');"
	@echo "            writes .spotkeeper/mutants.json"
	@echo "make soak   10,000 virtual days on recorded markets with every fault at once; writes .spotkeeper/soak.json"
	@echo "make crash  kill -9 at every point of a save, failing disks, flipped bytes; writes .spotkeeper/crash.json"
	@echo "make ec2    the function killed, frozen and left without news at every point of thirteen stories on EC2"
	@echo "make stories  the same on Compute Engine, and 100 random stories in which all faults happen at once"
	@echo "make burst  10,000 machines that report at once, and 20,000 ended jobs"
	@echo "make lifecycle  whole jobs on the one-machine cloud: moves, hangs, slow machines, lost disks, elastic jobs"
	@echo "make recovery  launchers, agents and scripts killed, signalled and cut off in every way, under zygote and exec"
	@echo "make features  whatever people train with, in 1, 2 and 3 ranks, stopped or killed; writes .spotkeeper/features.json;"
	@echo "            then tests that must fail once a rule of images is taken away"
	@echo "make bench  what is measured, with goals; writes bench/results.json"
	@echo "make gpu    checkpoints and recovery on a GPU, where there is one; writes bench/gpu.json"
	@echo "make security  all bad input: 99 classes and 100,000 generated bodies; whole, it writes .spotkeeper/security.json"
	@echo "make setup  .venv from requirements.lock; all others begin with it"
	@echo "make operator  .venv with what \`pulumi up\` and the command need, from the same lock: no torch"
	@echo "make lint   ruff, shellcheck, zizmor   make types  mypy"
	@echo "make lock   requirements.lock anew     make clean  remove .venv and caches"

setup: .venv/.stamp

.venv/.stamp: requirements.lock pyproject.toml .ci/setup
	@PYTHON=$(PYTHON) bash .ci/setup

operator:
	@PYTHON=$(PYTHON) bash .ci/operator

demo: setup
	@$(BIN)/python -m spotkeeper.local.demo $(ARGS)

test: setup
	@$(BIN)/python -m tests.run "$(if $(ARGS),,test)" -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

# Unit tests of what is pure or has a stand-in, without simulated hours of whole jobs, and one real job that loses a
# machine and is cancelled: it mostly waits, so it has one of three processes for itself.
QUICK := tests/contract tests/report tests/replay tests/client tests/reconcile tests/cli/stacks tests/infra/settings \
  tests/lifecycle/test_ends.py::test_a_job_cancelled_while_it_recovers_leaves_nothing \
  $(addprefix --ignore=tests/reconcile/,decide/gang/test_zone_probe.py decide/gang/test_zone_probe_faults.py \
  decide/provisioning/test_all_or_nothing.py decide/provisioning/test_backup.py decide/test_chaos.py \
  decide/queue/test_whole_jobs.py select/test_hostile_markets.py service/test_aws_lambda.py) \
  --ignore=tests/report/forecast/test_forecast.py

quick: setup
	@$(BIN)/python -m tests.run "$(if $(ARGS),,quick)" -n 3 --dist loadfile --no-loadscope-reorder \
	  $(QUICK) $(ARGS)

# Pulumi's own engine is no Python package: https://www.pulumi.com/docs/install/ (pulumi, pulumi-language-python).
# Nor is Google's provider for it: `pulumi plugin install resource gcp`. What is not there is skipped, with its reason.
engine: setup
	@SPOTKEEPER_TESTS_WHOLE=1 $(BIN)/python -m pytest -m "matrix or not matrix" tests/engine tests/infra/test_bundle.py \
	  tests/infra/aws/test_declared.py tests/local/compute/test_gcloud.py $(ARGS)

adapters: .venv-adapters/.stamp
	@.venv-adapters/bin/python -m pytest tests/train/adapters tests/lifecycle/test_adapters.py $(ARGS)

.venv-adapters/.stamp: .venv/.stamp .ci/adapters
	@bash .ci/adapters

security: setup
	@SPOTKEEPER_TESTS_WHOLE=1 $(BIN)/python -m pytest tests/security $(ARGS)

soak: setup
	@$(BIN)/python bench/soak.py $(ARGS)

crash: setup
	@$(BIN)/python -m tests.train.crash $(ARGS)

ec2: setup
	@SPOTKEEPER_TESTS_WHOLE=1 $(BIN)/python -m pytest -m "matrix or not matrix" tests/sim/test_ec2_stories.py $(ARGS)

stories: setup
	@SPOTKEEPER_TESTS_WHOLE=1 $(BIN)/python -m pytest -n logical --dist loadfile --timeout=3600 -m "matrix or not matrix" tests/model \
	  tests/reconcile/decide tests/reconcile/select tests/sim --ignore=tests/sim/test_ec2_stories.py tests/properties \
	  tests/reconcile/controller/test_repair.py tests/integrations/test_journal.py $(ARGS)

burst: setup
	@SPOTKEEPER_TESTS_WHOLE=1 $(BIN)/python -m pytest tests/scale $(ARGS)

recovery: setup
	@SPOTKEEPER_TESTS_WHOLE=1 $(BIN)/python -m pytest -m "matrix or not matrix" tests/agent/agent/test_recovery.py tests/agent/launcher/test_launcher.py tests/agent/launcher/test_orphans.py tests/train/loop $(ARGS)
	@SPOTKEEPER_TESTS_LAUNCHER=zygote $(BIN)/python -m pytest tests/agent/agent/test_recovery.py tests/agent/agent/test_agent.py $(ARGS)
	@SPOTKEEPER_TESTS_LAUNCHER=exec $(BIN)/python -m pytest tests/agent/agent/test_recovery.py tests/agent/agent/test_agent.py $(ARGS)

lifecycle: setup
	@SPOTKEEPER_TESTS_WHOLE=1 $(BIN)/python -m tests.run "" -m "matrix or not matrix" -n auto --dist loadfile tests/lifecycle $(ARGS)

features: setup
	@$(BIN)/python -m tests.train.features $(ARGS)
	@$(BIN)/python -m pytest -m matrix tests/train/checkpoint/test_rules.py

mutants: setup
	@$(BIN)/python -m tests.mutants $(ARGS)

model: setup
	@$(BIN)/python -m tests.model $(ARGS)

bench: setup
	@$(BIN)/python bench/run.py $(ARGS)

gpu: setup
	@$(BIN)/python bench/gpu.py $(ARGS)

lint: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/shellcheck .ci/run .ci/setup .ci/adapters .ci/operator .githooks/pre-commit .githooks/commit-msg .github/labeled
	@$(BIN)/zizmor --offline --quiet .github
	@if command -v actionlint >/dev/null; then PATH="$(BIN):$$PATH" actionlint; fi

types: setup
	@$(BIN)/mypy --no-error-summary spotkeeper agent/spotkeeper_agent infra bench

# No addresses in the locks, and all platforms in one file. The policy pack's has the program's versions,
# but for protobuf and what needs its newer one.
lock: setup
	@$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --extra dev --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --no-header --no-annotate pyproject.toml -o requirements.lock
	@sed -nE '/^(protobuf|googleapis-common-protos)==/d; s/^([a-z0-9][^ ]*==[^ ]*( ;[^\\]*)?).*/\1/p' requirements.lock | \
	  $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --constraint - --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --no-header --no-annotate infra/policy/requirements.in \
	  -o infra/policy/requirements.txt
	@if grep -nE '://' requirements.lock infra/policy/requirements.txt; then echo "an address got in" >&2; exit 1; fi

clean:
	rm -rf .venv .venv-adapters .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build

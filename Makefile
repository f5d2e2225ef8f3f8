# Every target sets up what it needs; nothing is installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
# Without a GPU this version's CPU build will do; a newer torch brings gigabytes of CUDA along.
TORCH ?= $(if $(shell command -v nvidia-smi),torch,torch==2.13.0)

# Tests run in this many processes, one more than there are cores, as some tests wait. None depends
# on another. Servers of a file are shared, so a file stays in one process. A process that crashes
# ends the run: with a new one in its place, the run may wait forever.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0
# Tests that start no process, load no model and simulate nothing, for `make check`.
PURE := tests/wire tests/test_architecture.py tests/test_public_api.py \
	$(addprefix tests/test_,errors.py slo.py types.py) \
	$(addprefix tests/repository/test_,manifest.py pbtxt.py pbtxt_fields.py pbtxt_warmup.py) \
	$(addprefix tests/serving/test_,batcher.py slo_batcher.py slab.py) \
	$(addprefix tests/llm/test_,blocks.py pace.py scheduler.py stops.py table_rows.py wait_policy.py) \
	$(addprefix tests/benchmark/test_,ci_gate.py exchange.py messages.py recorder.py verdicts.py) \
	$(addprefix tests/optimizer/test_,binomial.py budget.py columns.py goals.py outcomes.py plan_file.py scores.py time_plan.py)

.PHONY: docs demo demo-llm check test test-slow test-gpu lint verify verify-operate verify-shards verify-deploy verify-monitoring verify-triton verify-ray verify-scaling fuzz bench-gate bench-serving clean

# Optimise a sentiment classifier to a latency target: under 3 minutes, plus set-up on the first run.
demo: $(READY)
	$(BIN)/python examples/demo.py

# A language model: chat, and load as of a conversation service.
demo-llm: $(READY)
	$(BIN)/python examples/demo_llm.py

# Before a commit: lint, types and the pure tests.
check: lint
	$(PYTEST) -n $(shell nproc) -m "not verify and not slow" $(PURE)

# Before a pull request: lint, types and all tests but the slow ones.
test: lint
	$(PYTEST) -m "not verify and not slow"

# Tests that are slow by nature, and the property tests with all their examples.
test-slow: $(READY)
	$(PYTEST) -m "slow and not verify"
	$(PYTEST) -m "hypothesis and not slow and not verify" --hypothesis-profile full

# On a machine with an NVIDIA GPU; elsewhere everything is skipped.
test-gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu -rs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Load, faults and timing: minutes, and sensitive to what else the machine does. With ROW=11 that row
# of docs/reliability.md, as often as it has to run; interrupted, the same command resumes.
verify: $(READY)
ifdef ROW
	$(BIN)/python tests/scorecard.py $(ROW)
else
	$(BIN)/python -m pytest -m verify -v -s --hypothesis-profile explore --ignore tests/deploy --ignore tests/e2e/test_redis_cache.py
endif

# Faults, drain, reload, cancellation, quotas and bits with 1, 2 and 4 shards, and the laws of
# batching: at most 30 minutes on two cores. CHECK=drain runs the checks with this in their title.
verify-shards: $(READY)
	$(BIN)/python tests/shard_checks.py --only "$(CHECK)"

# A Ray cluster of two nodes on this machine: kill a node under load, scale, roll an update, and more.
# About ten minutes on two cores; Ray lives in an environment of its own. CHECK=node runs the checks
# with this in their title.
RAY := .bench/ray
verify-ray: $(RAY)/.ready
	$(RAY)/bin/python tests/ray_cluster.py --only "$(CHECK)"

$(RAY)/.ready: pyproject.toml
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[ray,llm]" "openai>=2.0" "tritonclient[http]>=2.60"
	touch $(RAY)/.ready

# Alerts and dashboards in a real Prometheus (Debian package): about three minutes.
verify-monitoring: $(READY)
	$(BIN)/python -m pytest tests/deploy/test_monitoring.py

# What Triton needs other programs for: the response cache in a real Redis (Debian package
# redis-server), exported repositories in a real Triton (from PyPI, half a gigabyte, its Python
# backend only), and Triton's own examples and tests with 1 and 2 shards, from your checkouts:
# TRITON_CLIENT=... TRITON_SERVER=... TRITON_PYTHON_BACKEND=... (without them it says how to get
# them). What is missing fails. GROUP=clients runs these examples only. About an hour.
verify-triton: export TRITON_CLIENT := $(TRITON_CLIENT)
verify-triton: export TRITON_SERVER := $(TRITON_SERVER)
verify-triton: export TRITON_PYTHON_BACKEND := $(TRITON_PYTHON_BACKEND)
verify-triton: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[redis]" attrdict sseclient-py
ifdef GROUP
	$(BIN)/python tests/triton_examples.py --group $(GROUP)
else
	$(BIN)/python tests/triton_examples.py --list > /dev/null
	$(BIN)/python -m pytest -v -m verify tests/e2e/test_redis_cache.py tests/e2e/test_triton_export.py
	$(BIN)/python tests/triton_examples.py
endif

# The image, compose.yaml, rendered pods behind haproxy, schemas of all kinds, the chart, the unit:
# real podman, Prometheus and haproxy, as root. What is missing fails. CHECK=pods runs the tests
# with this in their name. TEST_BASE is a base image from a registry; without it, debootstrap makes
# one, once. 30 minutes on the first run, 15 later, on two cores.
verify-deploy: $(READY)
	$(BIN)/python -m pytest tests/deploy -m verify -v -s -k "$(CHECK)"

# Instances that follow the load of a real trace, simulated and with real processes, beside an oracle:
# about 22 minutes. Fails if the SLO is missed, a request is lost, or more than 1.3 times the oracle's
# instance-hours are used.
verify-scaling: $(READY)
	$(BIN)/python -m pytest tests/operate/test_scaling_replay.py tests/e2e/test_scaling_served.py
	$(BIN)/python benchmarks/autoscaling.py

# A model's life in production under load: a canary that is promoted in steps, and two planted faults
# that are rolled back; at most 10 minutes on two cores.
verify-operate: $(READY)
	$(BIN)/python tests/operate_story.py

# Every parser under coverage guidance, this long each; atheris lives in an environment of its own.
FUZZ := .bench/fuzz
FUZZ_SECONDS ?= 60
fuzz: $(FUZZ)/.ready
	$(FUZZ)/bin/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS)

$(FUZZ)/.ready: pyproject.toml
	$(PYTHON) -m venv $(FUZZ)
	$(FUZZ)/bin/python -m pip install --quiet --disable-pip-version-check -e . "atheris>=3.0"
	touch $(FUZZ)/.ready

# Exit code 2 when this tree serves more slowly than BASE; both are measured here, in turns.
BASE ?= main
bench-gate: $(READY)
	$(BIN)/python benchmarks/gate.py $(BASE)

# Side by side with Triton, MLServer, LitServe and BentoML; each gets a virtual environment under .bench/.
bench-serving: $(READY)
	$(BIN)/python benchmarks/serving_overhead.py

# The documentation as a site in build/site, which needs no network; fails on a broken link.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch $(DOCS_READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,torch,openvino,hf]"
	touch $(READY)

clean:
	rm -rf $(VENV) .bench build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

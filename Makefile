# `make demo` and `make test` need a Python >= 3.12 and nothing else: both make .venv.
# ARGS adds options, as in: make demo ARGS="--steps 20", make test ARGS=tests/losses.

EXTRAS := math,envs,schema,parquet,hub,gguf,pictures,ray,serve,tools,openenv,notebooks,docs,dev
CHECKS := check-format check-lint check-types check-layers check-docs

# Tests start some hundred processes: each would compile what it imports, JAX too.
unexport PYTHONDONTWRITEBYTECODE

# Two processes, a file in one of them: what a file's tests share is computed once.
# Files go in the order of their names: the few tests that take a minute are not the last.
PYTEST := .venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo smollm2 quick test test-all mutations check $(CHECKS) check-kernels check-jetstream
.PHONY: check-bfcl check-verifiers docs format notebooks parity lock environment

# A small model learns from reward alone; runs/demo/report.html shows how.
demo:
	@tools/setup.sh
	.venv/bin/python -m launch.grpo --recipe demo $(ARGS)

# A real model of 135 million parameters, for `python -m launch.grpo --recipe sums`.
smollm2:
	@tools/setup.sh gguf
	.venv/bin/python tools/smollm2.py

# While writing: no processes, no meshes; ARGS names the part, as in ARGS=tests/losses.
quick: environment
	$(PYTEST) -m "not all and not processes and not meshes" $(ARGS)

# Checks of CI: something of everything.
test: environment
	$(PYTEST) -m "not all" $(ARGS)

# Every kill, every mesh, the notebooks and the commands of the README too.
test-all: environment
	$(PYTEST) $(ARGS)

# Whether the tests notice faults that are put into the package.
mutations: environment
	.venv/bin/python -m tests.mutations.check $(ARGS)

# Checks of CI in addition to the tests.
check: $(CHECKS)

check-format: environment
	.venv/bin/ruff format --check .

check-lint: environment
	.venv/bin/ruff check .

check-types: environment
	.venv/bin/pyright

check-layers: environment
	.venv/bin/lint-imports --no-logo

check-docs: docs

# Kernels and plans, compiled for TPUs and GPUs that are not there, at the shapes of real models.
check-kernels: environment
	tools/kernels.sh $(ARGS)

# The adapter for JetStream, under JetStream, which is installed for this alone.
check-jetstream: environment
	tools/jetstream.sh $(ARGS)

# The environment of BFCL, with its package, which is installed for this alone.
check-bfcl: environment
	tools/bfcl.sh $(ARGS)

# verifiers' client for training against the server, in an environment of its own.
check-verifiers: environment
	tools/verifiers.sh $(ARGS)

# The docs site, in build/site; a dead link or anchor, or any other warning, is an error.
docs: environment
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

format: environment
	.venv/bin/ruff check --fix-only --quiet .
	.venv/bin/ruff format .

# Runs them and writes their outputs into them.
notebooks: environment
	.venv/bin/python tools/notebooks.py notebooks/*.ipynb

# Against torch and transformers, in an environment of their own.
parity: environment
	tools/parity.sh

lock:
	@tools/setup.sh
	tools/lock.sh $(ARGS)
	tools/setup.sh
	tools/plotly.sh

environment:
	@tools/setup.sh $(EXTRAS)

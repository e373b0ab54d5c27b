# `make demo` and `make test` need a Python >= 3.12 and nothing else: both make .venv.
# ARGS adds options, as in: make demo ARGS="--steps 20", make test ARGS=tests/losses.

EXTRAS := math,envs,chat,dev

.PHONY: demo test check format parity lock

# A small model learns arithmetic; runs/demo/report.html shows how.
demo:
	@tools/setup.sh
	.venv/bin/python -m launch.grpo $(ARGS)

test:
	@tools/setup.sh $(EXTRAS)
	.venv/bin/python -m pytest $(ARGS)

# What CI asks for beside the tests.
check:
	@tools/setup.sh $(EXTRAS)
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright
	.venv/bin/lint-imports

format:
	@tools/setup.sh $(EXTRAS)
	.venv/bin/ruff check --fix-only --quiet .
	.venv/bin/ruff format .

# Against torch and transformers, in an environment of their own.
parity:
	@tools/setup.sh $(EXTRAS)
	tools/parity.sh

lock:
	@tools/setup.sh
	tools/lock.sh $(ARGS)

# Two commands: `make up` starts the endpoint, `make test` runs everything that CI runs.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install up test lint soak clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@bash .ci/preflight "$(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python .ci/torch_build.py "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,mooncake]'
	@touch $@

up: install
	@$(BIN)/forebay up

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: lint
	@bash .ci/packages
	$(BIN)/pytest --numprocesses 2 --dist loadfile -m 'not endpoint'
	$(BIN)/pytest -m endpoint

soak: install
	@bash .ci/packages
	$(BIN)/pytest --soak

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

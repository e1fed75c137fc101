# Two commands set up everything: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  ?=
# one file:  make test TESTS=tests/test_encoder.py     one test:  make test TESTS="tests/test_encoder.py -k skip"
TESTS  ?= tests
# a test file to a process, as many as there are cores
JOBS   ?= -n auto --dist loadfile
export XLA_FLAGS ?= --xla_force_host_platform_device_count=8

.PHONY: demo test test-without-torch lint bench clean

# An environment for each set of extras would be slow to make: one is grown instead, a stamp for each set.
$(VENV)/.%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	touch $@

demo: $(VENV)/.media
	$(BIN)/jaxenc demo $(MODEL)

test: $(VENV)/.media,test,parity
	$(BIN)/python -m pytest $(JOBS) $(TESTS)

# what runs where there is no torch, such as on the newest Python
test-without-torch: $(VENV)/.media,test
	$(BIN)/python -m pytest $(JOBS) $(TESTS)

lint: $(VENV)/.media,lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.media,test,parity
	$(BIN)/python -m benchmarks.parity
	$(BIN)/python -m benchmarks.meshes
	$(BIN)/python -m benchmarks.readme
	$(BIN)/python -m benchmarks.loading
	$(BIN)/python -m benchmarks.convert
	$(BIN)/python -m benchmarks.speed $(if $(JAX_PYTHON),--jax-python $(BIN)/python --jax-python $(JAX_PYTHON))
	$(BIN)/python -m benchmarks.profile $(if $(JAX_PYTHON),--jax-python $(JAX_PYTHON))
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.plots
	$(BIN)/python -m benchmarks.plans
	$(BIN)/python -m benchmarks.packing
	$(BIN)/python -m benchmarks.packing_speed

clean:
	rm -rf $(VENV)

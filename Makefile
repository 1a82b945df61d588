# Every target makes .venv when it is missing, or when what it is made from has changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PEERS := .venv/peers/ready
PACKAGES := recorder ray optuna rules bridges trackers storage export testing cli
SOURCES := $(addprefix .venv/src/heliograph/,__init__.pyi __main__.py spi.pyi tuning.py builtin_callbacks core events plugins)

# The tests on Ray often wait. Types and documentation are checked meanwhile, and their errors do not stop the tests.
MAKEFLAGS += --jobs=2 --keep-going

# pytest rewrites the assertions of 700 files. Their bytecode spares the other worker half of that.
unexport PYTHONDONTWRITEBYTECODE

TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
ON_RAY := packages/ray/tests/on_ray
RUN_ON_RAY := OMP_NUM_THREADS=1 $(BIN)/python $(ON_RAY)/run.py

.PHONY: demo test tests on-ray test-all mutants torture bench bench-ray gpu docs check lint types browser clean

demo: $(READY)
	$(BIN)/python -m heliograph demo

# A sample of the kills and faults. `make test PACKAGE=ray` runs the tests of one package,
# PACKAGE=kernel those of the kernel, PACKAGE=tests those of the whole.
# Make starts prerequisites in their order: the tests on both cores come last.
ifdef PACKAGE
FOLDERS := $(if $(filter kernel,$(PACKAGE)),tests,$(if $(filter tests,$(PACKAGE)),packages/tests,packages/$(PACKAGE)/tests))
test: $(if $(filter ray,$(PACKAGE)),on-ray) tests
else
FOLDERS := tests packages
test: lint on-ray types docs tests
tests: lint browser
endif
tests: $(READY)
	$(TESTS) $(FOLDERS) -n 2 --dist worksteal --ignore=$(ON_RAY)

# The tests that start a Ray cluster. After one fails or hangs, the rest run in a new process.
on-ray: $(READY)
	$(RUN_ON_RAY)

# Every case of every test, with coverage.
test-all: check docs browser
	$(TESTS) tests packages -n 2 --dist worksteal --ignore=$(ON_RAY) --cov --cov-report=term --whole
	$(RUN_ON_RAY) --durations=15 --whole

# An hour: puts faults into copies of the sources, one at a time, and shows which of them the tests of make test find.
mutants: $(READY)
	$(BIN)/python packages/tests/mutants.py

check: lint types

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	MYPYPATH=.venv/src $(BIN)/mypy $(SOURCES) tests packages

# One test looks at the timeline page in Chromium, and skips where there is none; a machine of CI installs it.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	if [ -n "$$CI" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null; \
	else echo "There is no Chromium: the test of the timeline page will be skipped."; fi

torture: $(READY)
	$(BIN)/python packages/tests/torture/torture.py
	OMP_NUM_THREADS=1 $(BIN)/python packages/tests/torture/programs.py --count 2000 --jobs 2
	OMP_NUM_THREADS=1 $(BIN)/python packages/tests/torture/silent.py --count 20000 --seed 20000 --jobs 2
	$(BIN)/python packages/tests/torture/workers.py
	$(BIN)/python packages/tests/torture/trainings.py
	OMP_NUM_THREADS=1 $(BIN)/python packages/tests/torture/asked.py
	OMP_NUM_THREADS=1 $(BIN)/python packages/tests/torture/hostile.py
	$(BIN)/python packages/tests/torture/planted.py

bench: $(PEERS)
	$(BIN)/python packages/tests/benchmarks/bench.py

bench-ray: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python packages/tests/benchmarks/bench_ray.py

# On a machine with a GPU: every test that needs one, then the loop beside those of others, as a table for the page. With
# an interpreter that is there already: make gpu BIN=/path/to/bin READY=, and PYTHONPATH to a folder with this one in it.
ROUNDS ?= 5
gpu: $(READY)
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch sees no CUDA device.")'
	@$(TESTS) -rs -m gpu $$(grep -rl 'mark.gpu' tests packages --include='test_*.py'); failed=$$?; \
	$(BIN)/python packages/tests/benchmarks/gpu_peers.py --rounds $(ROUNDS) && exit $$failed

docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

clean:
	rm -rf .venv build docs/_build *.egg-info packages/*/build packages/*/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*

# Type checkers cannot run the import hook of an editable install. The links in .venv/src show the sources to mypy here; those
# in site-packages show them, as packages of stubs, to a type checker that checks a user's script with this environment.
# torchvision has its own folder: its compiled part does not fit torch's build for CPUs, so other libraries must not see it.
$(READY): pyproject.toml constraints.txt $(PACKAGES:%=packages/%/pyproject.toml)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]' $(PACKAGES:%=-e packages/%)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target .venv/vision timm torchvision
	mkdir -p .venv/src
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	ln -sfn "$(CURDIR)" .venv/src/heliograph; \
	ln -sfn "$(CURDIR)" "$$site/heliograph-stubs"; \
	for name in $(PACKAGES); do \
		ln -sfn "$(CURDIR)/packages/$$name/heliograph_$$name" ".venv/src/heliograph_$$name"; \
		ln -sfn "$(CURDIR)/packages/$$name/heliograph_$$name" "$$site/heliograph_$$name-stubs"; \
	done
	touch $(READY)

# TorchTNT, which only the bench uses, lies apart too: it imports what setuptools has removed since.
$(PEERS): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/peers \
		torchtnt==0.2.4 pyre-extensions==0.0.32 tabulate==0.10.0 typing-inspect==0.9.0 mypy-extensions==1.2.0 setuptools==80.10.2
	touch $(PEERS)

# Every target makes .venv when it is missing, or when what it is made from has changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PEERS := .venv/peers/ready
SOURCES := -m heliograph -m heliograph.__main__ -p heliograph.bridges -p heliograph.builtin_callbacks -p heliograph.cli \
	-p heliograph.core -p heliograph.demo -p heliograph.events -p heliograph.plugins -p heliograph.presets \
	-p heliograph.publishing -p heliograph.reruns -p heliograph.testing -p heliograph.watch

# The types and the documentation are checked at the same time.
MAKEFLAGS += --jobs=2

TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test test-all mutants torture bench bench-ray gpu docs check lint types browser clean

demo: $(READY)
	$(BIN)/python -m heliograph demo

# A sample of the kills and faults, and the first lane of the tests on Ray: a cluster takes both cores, so one at a time.
test: check docs browser
	$(TESTS) -n 2 --dist worksteal --ignore=tests/on_ray
	$(TESTS) tests/on_ray

# Every case of every test, with coverage, and all tests on Ray.
test-all: check docs browser
	$(TESTS) -n 2 --dist worksteal --ignore=tests/on_ray --cov --cov-report=term --whole
	$(TESTS) tests/on_ray --durations=15 --whole

# An hour: puts faults into copies of the sources, one at a time, and shows which of them the tests of make test find.
mutants: $(READY)
	$(BIN)/python tests/mutants.py

check: lint types

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	MYPYPATH=.venv/src $(BIN)/mypy $(SOURCES)
	MYPYPATH=.venv/src $(BIN)/mypy tests

# One test looks at the timeline page in Chromium, and skips where there is none; a machine of CI installs it.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	if [ -n "$$CI" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null; \
	else echo "There is no Chromium: the test of the timeline page will be skipped."; fi

torture: $(READY)
	$(BIN)/python tests/torture/torture.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture/programs.py --count 2000 --jobs 2
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture/silent.py --count 20000 --seed 20000 --jobs 2
	$(BIN)/python tests/torture/rules.py
	$(BIN)/python tests/torture/workers.py
	$(BIN)/python tests/torture/trainings.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture/asked.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture/hostile.py
	$(BIN)/python tests/torture/planted.py

bench: $(PEERS)
	$(BIN)/python tests/benchmarks/bench.py

bench-ray: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_ray.py

# On a machine with a GPU: every test that needs one, then the loop beside those of others, as a table for the page. With
# an interpreter that is there already: make gpu BIN=/path/to/bin READY=, and PYTHONPATH to a folder with this one in it.
ROUNDS ?= 5
gpu: $(READY)
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch sees no CUDA device.")'
	@$(TESTS) -rs -m gpu $$(grep -rl 'mark.gpu' tests --include='test_*.py'); failed=$$?; \
	$(BIN)/python tests/benchmarks/gpu_peers.py --rounds $(ROUNDS) && exit $$failed

docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

clean:
	rm -rf .venv build docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*

# The link lets the type checker see the repository's root as the package that it is. torchvision lies apart: its compiled
# part does not fit torch's build for CPUs, so the other libraries, which import it where they see it, must not see it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,examples]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target .venv/vision timm torchvision
	mkdir -p .venv/src && ln -sfn ../.. .venv/src/heliograph
	touch $(READY)

# TorchTNT, which only the bench uses, lies apart too: it imports what setuptools has removed since.
$(PEERS): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/peers \
		torchtnt==0.2.4 pyre-extensions==0.0.32 tabulate==0.10.0 typing-inspect==0.9.0 mypy-extensions==1.2.0 setuptools==80.10.2
	touch $(PEERS)

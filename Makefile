# make train   set up .venv, then train a hybrid GRPO agent on Hopper-v5 (RECIPE=cartpole ARGS="--seed 3" for another run)
# make test    set up .venv, then run the tests
# make test-robots   set up .venv-robots with an older MuJoCo, then run the tests of the robots that need it
# make check   what has to pass before a commit: lint, types, layers, tests
# make tables  write the tables of README.md, agents/README.md and docs/ again
# make bench   run what is missing of a study and write its report (STUDY=experiments/cartpole-acrobot.yaml for another)
PYTHON ?= python3
VENV ?= .venv
RECIPE ?= hopper
STUDY ?= experiments/mujoco-hybrid.yaml
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: setup train test test-robots lint format check tables bench clean

setup: $(READY)

# Once: again only when the requirements change.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"grpo_rl needs Python 3.11 or later; $(PYTHON) is {v[0]}.{v[1]}. Try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[box2d,minigrid,atari,robotics,wandb,text,peft,reasoning,dev]"
	touch $@

train: $(READY)
	$(BIN)/grpo-rl train $(RECIPE) $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

test-robots: .venv-robots/ready
	PYTHONPATH=. .venv-robots/bin/python -m pytest tests/forks/test_families.py -k "older or compile" $(ARGS)

.venv-robots/ready: constraints-robots.txt
	$(PYTHON) -m venv .venv-robots
	.venv-robots/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-robots.txt \
		dm-control gymnasium gymnasium-robotics imageio mujoco shimmy stable-baselines3 pytest pytest-timeout pytest-xdist
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test

tables: $(READY)
	sed -n '/^|/!p' agents/README.md > agents/README.draft
	$(BIN)/grpo-rl list --markdown >> agents/README.draft
	mv agents/README.draft agents/README.md
	$(BIN)/python docs/make_forking_table.py
	for page in engine learner monitor workers; do $(BIN)/python docs/make_$$page.py --tables-only; done
	$(BIN)/python docs/make_results.py

bench: $(READY)
	$(BIN)/grpo-rl bench $(STUDY) $(ARGS)

clean:
	rm -rf $(VENV) .venv-robots build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

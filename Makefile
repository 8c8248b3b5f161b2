# make train    train a diffusion transformer on real digits, with a picture at the end
# make test     the whole suite
# make sweep    the slow sweeps, as long as SWEEP_MINUTES allows
# Each does its own set-up: a virtual environment in .venv, pinned by constraints.txt.

PYTHON ?= python3
VENV := .venv
SWEEP_MINUTES ?= 60
OVERRIDES ?=

.PHONY: train test sweep clean

$(VENV)/.installed: setup.py pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e '.[digits,tensorboard,s3,test]'
	touch $@

train: $(VENV)/.installed
	$(VENV)/bin/fairtrain task=digits $(OVERRIDES)

test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -m "not slow"

sweep: $(VENV)/.installed
	$(VENV)/bin/python tests/sweep.py --minutes $(SWEEP_MINUTES)

clean:
	rm -rf $(VENV) build *.egg-info

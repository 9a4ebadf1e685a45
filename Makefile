# The front door. Each target is a short script in tools/, to be run by hand as well.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all nightly bench wheel format lint clean

# Tools that setup put into .venv (ruff; CMake where the system's is too old) win.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# Variables given on the command line (make demo RATE=100mbit) reach the scripts through the environment.

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: ## system packages (as root), .venv with torch, the extension built and installed
	@tools/setup

demo: ## train a small GPT over a slow link with low-rank methods; one table, one picture (RATE=, SECONDS_EACH=)
	@tools/setup
	@.venv/bin/python benchmarks/training/demo.py

test: ## release, ASan + UBSan of what handles raw memory, TSan, 5 s of each fuzzer, pytest
	@tools/setup --tests
	@tools/ci/test

test-all: ## test, ASan + UBSan of all folders, clang, longer fuzzing, the long fault campaign, slow and repeated tests, benchmarks as a smoke test, the wheel, that with torch 2.11, 2.12, 2.14 and 2.15, Lightning, Accelerate and Transformers
	@tools/setup --tests
	@tools/ci/test --all

nightly: ## test-all, then 10,000 faults that no night had before, and 10 minutes of each fuzzer
	@tools/setup --tests
	@tools/ci/test --all
	@tools/ci/faults 10000 "$$(date +%Y%m%d)00000"
	@tools/ci/fuzz 600

bench: ## run the C++ benchmarks (FILTER=regex chooses; those that train: benchmarks/training/*.py --help)
	@tools/setup --tests
	@tools/bench

wheel: ## build a wheel into dist/, with the libraries it needs inside
	@tools/setup --wheel
	@tools/wheel

format: ## format all C++ and Python sources in place
	@tools/setup --tests
	@tools/ci/style --fix

lint: ## the checks of style: includes, formatting, golden lists, sizes
	@tools/setup --tests
	@tools/ci/style

clean: ## remove build results; .venv stays
	rm -rf build dist

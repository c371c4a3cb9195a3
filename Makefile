# Every verb makes the environment it needs; `make` alone lists them.
PYTHON ?= python3
# The pinned build is installed first and by itself, so that nothing else can pull in another one.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help run serve test lint format perf-analyzer bench table tflite-runtime torchserve migrate \
	managed runtimes tfserving-clients triton-package upstream upstream-triton protos fuzz soak clean

help: ## List the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "modelport needs Python 3.11 or newer; try: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install --editable ".[torch,tensorflow,litert,huggingface,dev]"
	@touch $@

run: $(READY) ## Train, export, prove, publish, serve and call the two demo models
	$(BIN)/modelport demo

serve: $(READY) ## Keep the demo's gateway running: HTTP 8000, gRPC 8001, metrics 8002
	@test -d model_repository/fraud -a -d model_repository/vit || $(BIN)/modelport demo
	$(BIN)/modelport serve --model-repository model_repository

test: $(READY) ## Run the whole default test suite
	$(BIN)/python -m pytest

lint: $(READY) ## Check style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

perf-analyzer: $(READY) ## Drive the gateway with Triton's unmodified perf_analyzer
	$(BIN)/python -m loadtests.perf_analyzer

bench: $(READY) ## Measure requests per second beside MLServer and a bare ASGI handler
	$(BIN)/python -m loadtests.peers

table: $(READY) ## Export every model to every format and write the README's table of it
	$(BIN)/python -m exporters.zoo.table

tflite-runtime: $(READY) ## Run fp32 and fp16 TFLite files on tflite-runtime 2.14, in its own environment
	$(BIN)/python -m tests.tflite_runtime

matrix: $(READY) ## Ask every backend in every dialect, real TorchServe and Triton too; needs Java 17
	$(BIN)/python -m tests.matrix --readme

runtimes: $(READY) ## Serve compiled archives; measure what 50 reloads leave in every runtime
	$(BIN)/python -m tests.runtimes

torchserve: $(READY) ## Prove TorchServe archives in a real TorchServe; needs Java 17
	$(BIN)/python -m tests.torchserve
	$(BIN)/python -m tests.torchserve.routed

migrate: $(READY) ## Migrate from a real TorchServe and compare its answers; needs Java 17
	$(BIN)/python -m tests.torchserve.migration

tfserving-clients: $(READY) ## Call a gateway with the official tensorflow-serving-api stubs
	$(BIN)/python -m tests.tfserving_clients

managed: $(READY) ## Kill -9 managed TorchServe and Triton, the real ones, under load; needs Java 17
	$(BIN)/python -m tests.managed

triton-package: $(READY) ## Prove Triton packages and warm-up samples in a real Triton
	$(BIN)/python -m tests.triton_package

upstream: $(READY) ## Run the conformance suite through a second gateway, over both protocols
	for via in grpc http; do MODELPORT_VIA=$$via $(BIN)/python -m pytest tests/conformance/test_infer.py \
		tests/conformance/test_errors.py tests/conformance/test_parity.py || exit 1; done

upstream-triton: $(READY) ## Compare answers through the gateway with a real Triton's own, bit by bit
	$(BIN)/python -m tests.upstream_triton

protos: $(READY) ## Generate the messages of gateway/wire/proto and exporters/formats/proto anew
	$(BIN)/python -m gateway.wire.proto
	$(BIN)/python -m exporters.formats.proto

fuzz: $(READY) ## Ten times the default fuzz: 10^6 decoder cases, 10^5 requests on the wire
	MODELPORT_FUZZ_CASES=1000000 MODELPORT_FUZZ_WIRE_CASES=100000 \
		$(BIN)/python -m pytest --timeout=3600 tests/attacks/test_fuzz.py tests/attacks/test_fuzz_tfserving.py

soak: $(READY) ## The long fault tests: SIGTERM under load x 50, reloads x 200
	MODELPORT_TRIALS=50 MODELPORT_RELOADS=200 \
		$(BIN)/python -m pytest --timeout=3600 tests/faults

clean: ## Remove environments, checkpoints and what was published
	rm -rf $(VENV) .peers checkpoints
	find model_repository -mindepth 1 -maxdepth 1 ! -name README.md -exec rm -rf {} +

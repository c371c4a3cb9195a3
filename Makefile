# Every target makes the environment it needs; `make` alone lists the targets.
PYTHON ?= python3
# The pinned build is installed first and by itself, so that nothing else can pull in another one.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# uv installs, which links packages from its cache; `make PIP=1 ...` has pip do it.
INSTALL := $(BIN)/python $(if $(filter 1,$(PIP)),-m pip --disable-pip-version-check install,.ci/install.py) \
	--constraint constraints.txt
# One environment, filled in two steps: what the demo needs, and what the other targets need.
DEMO := $(VENV)/.demo
READY := $(VENV)/.dev
# Many tests wait for servers of their own, so two more run than two cores would take. A file stays
# together, because its tests share what they export and start; tests/conftest.py has the order.
PARALLEL := --numprocesses 4 --dist loadfile --no-loadscope-reorder
# A page of results names the commit that it reports, and a run continues with results of that commit alone.
COMMIT = $(shell git rev-parse --short=12 HEAD)
STAMP = $(BIN)/python .ci/result_pages.py

.DEFAULT_GOAL := help
.PHONY: access access-timing audit bench-access bench-sight compare compare-faults constraints coverage docs docs-blocks docs-serve gpu-check gpu-wheels help package run serve test test-thorough lint format long-streams perf-analyzer bench bench-quick bench-startup bench-text \
	loadtest-agreement loadtest-backends bench-hop bench-python python-models drift-statistics gate-statistics rollout-statistics rollout-faults gate-real console report-browser bench-overload bench-memory bench-shadow chaos profile table tflite-runtime torchserve migrate \
	matrix mutations package pages peer-suites real-models runtimes storage swagger-ui text-clients tfserving-clients triton-package upstream upstream-triton protos sbom fuzz attacks-cost soak scaling sight sweep sweep-drawn sweep-operators \
	workers ray deploy envoy clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "modelport needs Python 3.11 or newer; try: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip setuptools
	$(INSTALL) "$(TORCH)"
	$(INSTALL) --no-build-isolation --editable ".[torch]"
	@touch $@

$(READY): $(DEMO)
	$(INSTALL) --no-build-isolation --editable ".[all,dev]"
	@touch $@

run: $(DEMO) ## Train, export, prove, publish, serve and call the two demo models
	$(BIN)/modelport demo

serve: $(DEMO) ## Keep the demo's gateway running: HTTP 8000, gRPC 8001, metrics 8002
	@test -d model_repository/fraud -a -d model_repository/vit || $(BIN)/modelport demo
	$(BIN)/modelport serve --model-repository model_repository

test: $(READY) ## Run the whole default test suite
	$(BIN)/python -m pytest $(PARALLEL)

test-thorough: $(READY) ## Run the tests that take longest, which `make test` leaves out
	$(BIN)/python -m pytest $(PARALLEL) -m thorough

lint: $(READY) ## Check style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY) ## Build the documentation into build/site; a broken link or reference fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-blocks: $(READY) ## Paste every block of README and docs into bash, page by page; 20 minutes
	MODELPORT_SLOW_TESTS=1 $(BIN)/python -m pytest --numprocesses 2 --dist load -m "" tests/docs/test_blocks.py

docs-serve: $(READY) ## Serve the documentation on port 8010, and rebuild it when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr localhost:8010

coverage: $(READY) ## Run both test suites, and check the minimum branch coverage
	$(BIN)/python -m pytest $(PARALLEL) -m "" --cov --cov-report term:skip-covered

audit: ## Look the pinned versions up in a database of known vulnerabilities
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install pip-audit
	$(VENV)/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

access: $(READY) ## Replace certificates 100 times under load, and other tests of access that take minutes
	$(BIN)/python -m tests.access

long-streams: $(READY) ## Keep gRPC streams of real clients open for a million messages; 20 minutes
	$(BIN)/python -m tests.long_streams

constraints: ## Resolve every extra again and pin the versions in constraints.txt, with hashes for the images; Python 3.11
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
		|| { echo "pins hold for later Pythons, not earlier ones: make PYTHON=python3.11 $@" >&2; exit 1; }
	rm -rf $(VENV)/constraints && $(PYTHON) -m venv $(VENV)/constraints
	$(VENV)/constraints/bin/python -m pip install --upgrade pip uv
	$(VENV)/constraints/bin/python .ci/constraints.py
	$(VENV)/constraints/bin/python .ci/constraints.py --check 3.12 3.13 3.14
	rm -rf $(VENV)/constraints

sbom: ## Write build/sbom.cdx.json, CycloneDX's list of everything in the package, the images and their files
	$(PYTHON) -m venv $(VENV)/sbom
	$(VENV)/sbom/bin/python -m pip install "cyclonedx-bom>=7,<8"
	$(VENV)/sbom/bin/python .ci/sbom.py build/sbom.cdx.json

perf-analyzer: $(READY) ## Drive the gateway with Triton's unmodified perf_analyzer
	$(BIN)/python -m benchmarks.perf_analyzer --window-ms $(or $(WINDOW_MS),1000)

bench: $(READY) ## Measure beside every peer, and write its page of the documentation; 25 minutes
	$(BIN)/python -m benchmarks.peers --page docs/benchmarks/servers.md
	$(STAMP) docs/benchmarks/servers.md

bench-access: $(READY) ## Measure what TLS costs, beside clear text and nginx
	$(BIN)/python -m benchmarks.access

bench-sight: $(READY) ## Measure what traces, the access log and recorded traffic cost, beside a gateway without them
	$(BIN)/python -m benchmarks.sight

sight: $(READY) ## Record and replay every dialect; record 100,000 requests while the disk fails at random
	$(BIN)/python -m tests.sight

bench-python: $(READY) ## Measure Python models beside Triton's Python backend, LitServe and BentoML, the same in one run
	$(BIN)/python -m benchmarks.python_backend
	$(BIN)/python -m benchmarks.decorated_functions

bench-startup: $(READY) ## Measure the time to READY, beside loading by hand and Triton, and each batch size's first request
	$(BIN)/python -m benchmarks.startup

compare: $(READY) ## Compare every format and backend on the demo's fraud model; under 10 minutes, needs Java 17
	@test -f checkpoints/fraud.pt || $(BIN)/modelport demo
	$(BIN)/modelport compare checkpoints/fraud.pt --html comparison.html --json-report comparison.json

compare-faults: $(READY) ## Compare backends, one of them slow and one wrong, which must be detected
	$(BIN)/python -m tests.loadtests.comparing

bench-quick: $(READY) ## The 4-float model on modelport, a bare handler, Triton and MLServer
	$(BIN)/python -m benchmarks.peers --models x2 --protocols json grpc --servers \
		modelport bare triton mlserver

loadtest-agreement: $(READY) ## Compare the load test's percentiles with those of wrk, h2load and perf_analyzer
	$(BIN)/python -m benchmarks.client_agreement

bench-hop: $(READY) ## Measure what the gateway adds in front of a real Triton and a TensorFlow Serving server
	$(BIN)/python -m benchmarks.hop

loadtest-backends: $(READY) ## Load-test the gateway, TorchServe and Triton in every protocol; needs Java 17
	$(BIN)/python -m tests.loadtests.backends

report-browser: $(READY) ## Open the reports, and /docs of a gateway, in headless Chromium: light, dark, narrow, hostile names
	$(BIN)/python -m tests.loadtests.report_browser
	$(BIN)/python -m tests.docs_browser

console: $(READY) ## Open the console in headless Chromium: every view and action, hostile names, 1,000 models; needs npm for axe
	$(BIN)/python -m tests.console_browser

swagger-ui: ## Fetch the pinned files of /docs from npm again
	$(PYTHON) .ci/swagger_ui.py

bench-text: $(READY) ## Embed texts on one core, beside ONNX Runtime and tokenizers by hand
	$(BIN)/python -m benchmarks.text

bench-overload: $(READY) ## Send ten times what the gateway can serve; check goodput, latency and recovery
	$(BIN)/python -m benchmarks.overload

bench-shadow: $(READY) ## Measure the demo's fraud model while a rollout copies 10 % of its requests
	@test -d model_repository/fraud || $(BIN)/modelport demo
	$(BIN)/python -m benchmarks.shadow

rollout-faults: $(READY) ## Kill workers, gateways and candidates during 50 rollouts under load; 15 minutes
	$(BIN)/python -m tests.rollout_faults

chaos: $(READY) ## Break one of two endpoints in every way, for every kind of route; 12 minutes
	$(BIN)/python -m tests.faults.chaos

profile: $(READY) ## Measure what a request costs on fraud 128, layer by layer, beside ONNX Runtime by hand (perf, py-spy)
	$(BIN)/python -m benchmarks.profile

gate-statistics: $(READY) ## Measure how often the gate is wrong, on thousands of simulated releases
	$(BIN)/python -m tests.loadtests.gating

drift-statistics: $(READY) ## Measure how often drift reports are wrong, on a thousand simulated days; 10 minutes
	$(BIN)/python -m tests.drift_statistics

rollout-statistics: $(READY) ## Measure how often rollouts are wrong, and what harm they find, on simulated ones; 10 minutes
	$(INSTALL) --no-deps ville==0.1.0 # an independent implementation of the confidence sequences
	$(BIN)/python -m tests.rollout_statistics --write

gate-real: $(READY) ## Gate the demo's fraud model against itself, a slower, a wrong and a retrained one
	@test -d model_repository/fraud || $(BIN)/modelport demo
	$(BIN)/python -m tests.loadtests.gating.real
	MODELPORT_SLOW_TESTS=1 $(BIN)/python -m pytest -m "" tests/loadtests/test_gate_attacks.py \
		tests/loadtests/test_gate_storage.py tests/loadtests/test_gate_cli.py \
		tests/loadtests/test_gate_retrained.py
	MODELPORT_DEPLOY_TESTS=1 $(BIN)/python -m pytest tests/deploy/test_pipelines.py -k trained_again

bench-memory: $(READY) ## Send 10^6 requests of every kind; a gateway that leaks must be detected
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.memory --control --requests 100000 --rounds 10

scaling: $(READY) ## Measure what a second worker brings
	$(BIN)/python -m benchmarks.scaling

workers: $(READY) ## Run the conformance and shutdown suites with two workers
	MODELPORT_WORKERS=2 $(BIN)/python -m pytest tests/conformance tests/faults/test_shutdown.py
	MODELPORT_SLOW_TESTS=1 $(BIN)/python -m pytest tests/gateway/server/workers

table: $(READY) ## Export every model to every format, beside Keras ports and litert-torch, and write the page
	$(BIN)/python -m tests.export_figures
	$(STAMP) docs/benchmarks/exports.md

sweep: $(READY) ## Export 150 architectures to every format, check each artifact, and write docs/sweep.md; continues where it was stopped; 2 hours; SHARD=I/N
	$(BIN)/python -m tests.sweep --shard $(or $(SHARD),1/1) --results build/sweep-$(COMMIT).jsonl --page docs/sweep.md
	$(BIN)/python -m tests.sweep.peers --results build/sweep-peers-$(COMMIT).jsonl --page docs/sweep.md
	$(STAMP) docs/sweep.md

sweep-drawn: $(READY) ## Export 110 architectures that a seed draws from other packages, and write docs/sweep-drawn.md; continues where it was stopped; 2 hours; SEED=N
	$(INSTALL) --no-deps --target build/drawn timm torchvision
	PYTHONPATH=build/drawn $(BIN)/python -m tests.sweep --draw 110 --seed $(or $(SEED),1) --format onnx --format savedmodel --format tflite \
		--results build/sweep-drawn-$(or $(SEED),1)-$(COMMIT).jsonl --page docs/sweep-drawn.md
	$(STAMP) docs/sweep-drawn.md

sweep-operators: $(READY) ## Convert every operator of PyTorch to ONNX, SavedModel and TFLite, and write docs/operators.md; continues where it was stopped; 1 hour; SHARD=I/N
	$(BIN)/python -m tests.sweep.operators --shard $(or $(SHARD),1/1) --results build/operators-$(COMMIT).jsonl --page docs/operators.md
	$(STAMP) docs/operators.md

pages: table sweep sweep-drawn sweep-operators matrix bench peer-suites ## Write every page of results again, for a release; 6 hours, needs Java 17

tflite-runtime: $(READY) ## Run fp32 and fp16 TFLite files on tflite-runtime 2.14, in its own environment
	$(BIN)/python -m tests.tflite_runtime

matrix: $(READY) ## Ask every backend in every dialect, real TorchServe and Triton too; needs Java 17
	$(BIN)/python -m tests.matrix --page docs/protocols/index.md
	$(STAMP) docs/protocols/index.md

package: $(READY) ## Build the wheel, install it without extras into an empty environment, and use it there
	$(BIN)/python -m tests.wheel

gpu-wheels: $(READY) ## Collect what `make gpu-check` needs on a machine without a network; GPU="--onnxruntime-gpu" too
	$(BIN)/python .ci/gpu_wheels.py $(GPU)

gpu-check: ## Serve models on an NVIDIA GPU, beside the CPU and a loop by hand; needs PyTorch with CUDA; 6 minutes; ARGS="--device cpu …"
	$(PYTHON) -m tests.gpu_check $(ARGS)

runtimes: $(READY) ## Serve compiled archives; measure what 50 reloads leave in every runtime
	$(BIN)/python -m tests.runtimes

torchserve: $(READY) ## Test TorchServe archives in a real TorchServe; needs Java 17
	$(BIN)/python -m tests.torchserve
	$(BIN)/python -m tests.torchserve.routed

migrate: $(READY) ## Migrate from a real TorchServe and compare its answers; needs Java 17
	$(BIN)/python -m tests.torchserve.migration

text-clients: $(READY) ## Call a gateway with the unmodified clients of OpenAI, LangChain, LlamaIndex and Cohere
	$(BIN)/python -m tests.text_clients

tfserving-clients: $(READY) ## Call a gateway with the official tensorflow-serving-api stubs
	$(BIN)/python -m tests.tfserving_clients

ray: $(READY) ## Ray Serve on a real cluster of three nodes: scale up and down, kill -9 a node under load
	$(BIN)/python -m tests.ray

storage: $(READY) ## Kill publishers to S3, race and cut off gateways; Azure's and Google's emulators (needs Node)
	$(INSTALL) --no-build-isolation --editable ".[azure,gcs]" gcp-storage-emulator
	MODELPORT_SLOW_TESTS=1 $(BIN)/python -m pytest --timeout=900 -s \
		tests/gateway/repository/storage/test_killed_publishers.py tests/gateway/repository/storage/test_emulators.py \
		tests/gateway/repository/storage/test_served_during_attacks.py tests/gateway/repository/storage/test_served.py

python-models: $(READY) ## Compare the answers of Python models with those of a real Triton
	$(BIN)/python -m tests.triton_python

triton-package: $(READY) ## Test Triton packages and warm-up samples in a real Triton
	$(BIN)/python -m tests.triton_package

upstream: $(READY) ## Run the conformance suite through a second gateway, over both protocols
	for via in grpc http; do MODELPORT_VIA=$$via $(BIN)/python -m pytest tests/conformance/test_infer.py \
		tests/conformance/test_errors.py tests/conformance/test_parity.py || exit 1; done

peer-suites: $(READY) ## Run Triton's, KServe's … own tests against a gateway; SOURCES=folder of clones, SUITES="name …"; JOBS=processes
	$(BIN)/python -m tests.peer_suites --output docs $(if $(SOURCES),--sources "$(SOURCES)") $(if $(JOBS),--jobs $(JOBS)) $(SUITES)
	$(STAMP) docs/peer-suites.md

real-models: $(READY) ## Serve 23 model files of Python packages without configuration, and pipelines of them, and compare with their runtimes; 250 MB
	$(BIN)/python -m tests.real_models

upstream-triton: $(READY) ## Compare answers through the gateway with a real Triton's own, bit by bit
	$(BIN)/python -m tests.upstream_triton

protos: $(READY) ## Generate the messages of gateway/wire, exporters/publishing and loadtests/users again
	$(BIN)/python -m modelport.gateway.wire.proto
	$(BIN)/python -m modelport.exporters.publishing.proto
	$(BIN)/python -m modelport.loadtests.users.proto

deploy: $(READY) ## Build images, render the chart, check and run what is in deploy/; Debian, root; 20 minutes
	MODELPORT_DEPLOY_TESTS=1 PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m pytest tests/deploy

envoy: $(READY) ## Put the real Envoy with deploy/envoy in front of gateways: tokens, certificates, rates, health checks
	MODELPORT_DEPLOY_TESTS=1 $(BIN)/python -m pytest tests/deploy/test_envoy.py

mutations: $(READY) ## Try every wrong lowering that one small change makes of an operator; 20 minutes
	$(BIN)/python -m tests.exporters.lowering.mutation_checks

fuzz: $(READY) ## Fifty times the default fuzz: 10^6 decoder cases, 10^5 requests on the wire, 10^5 credentials, 10^4 certificates
	MODELPORT_FUZZ_CASES=1000000 MODELPORT_FUZZ_WIRE_CASES=100000 \
		$(BIN)/python -m pytest --timeout=3600 tests/attacks/test_fuzz.py tests/attacks/test_fuzz_tfserving.py \
		tests/attacks/test_fuzz_access.py tests/attacks/test_fuzz_certificates.py
	$(BIN)/python -m tests.access_timing

access-timing: $(READY) ## Measure that refusing an API key takes as long however much of it is right; a minute
	$(BIN)/python -m tests.access_timing

attacks-cost: $(READY) ## What every request costs: a large sample of all routes, places, sizes and codings; 30 minutes
	$(BIN)/python -m tests.attacks.cost --requests 10000

soak: $(READY) ## The long fault tests: SIGTERM under load x 50, reloads x 200, Python models that fail x 350
	MODELPORT_TRIALS=50 MODELPORT_RELOADS=200 \
		$(BIN)/python -m pytest --timeout=3600 tests/faults
	$(BIN)/python -m tests.faults.python_isolation --trials 50

clean: ## Remove environments, checkpoints and what was published
	rm -rf $(VENV) .peers checkpoints
	find model_repository -mindepth 1 -maxdepth 1 ! -name README.md -exec rm -rf {} +

"""Schemathesis: requests generated from ``/openapi.json``, and the responses held to it.

Every route is asked, with models that are there and models that are not.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from tests import models
from tests.peer_suites.suite import Bench, Suite, SuiteOutcome, SuiteVerdict

#: Requests of each operation in the phase that draws them.
EXAMPLES = 50
SECONDS = 900
#: A model that cannot answer is 503, a feature that is lacking 501; a valid body may not suit the
#: model. TensorFlow Serving's answer to another method is 400. What is off is about sequences of
#: calls, credentials and required headers, of which the document has none.
CONFIG = """
[checks]
missing_required_header.enabled = false
use_after_free.enabled = false
ensure_resource_availability.enabled = false
ignored_auth.enabled = false
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "501", "503"]
positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "403", "404", "501", "503"]

[[operations]]
include-path-regex = "^/v1/models"
checks.unsupported_method.enabled = false
"""
#: The names of models: those that are generated, or one that is served, with its version, which
#: takes the place of invalid versions too.
RUNS = {
    "any model": CONFIG,
    "a served model": f"""
[parameters]
"path.model" = "x2"
"path.version" = "1"
{CONFIG}
[[operations]]
include-path-regex = "/versions/"
checks.negative_data_rejection.enabled = false
""",
}


def run(bench: Bench) -> Iterator[SuiteOutcome]:
    if not bench.wanted("openapi.json"):
        return
    root = bench.work / "models"
    models.repository(root)
    flags = ("--model-control-mode", "explicit", "--load-model", "*", "--allow-sagemaker", "on")
    for name, text in RUNS.items():
        config = bench.work / "schemathesis.toml"
        config.write_text(text)
        with bench.gateway(root, *flags, "--allow-client-shm", "on") as gateway:
            url = f"http://{gateway.http}"
            done = subprocess.run(
                [
                    *(str(bench.python.with_name("schemathesis")), "--config-file", str(config)),
                    *("run", f"{url}/openapi.json", "--url", url),
                    *("--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES)),
                    *("--continue-on-failure", "--warnings", "off", "--no-color"),
                ],
                cwd=bench.work,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        passed = done.returncode == 0
        verdict = SuiteVerdict.PASS if passed else SuiteVerdict.FAIL
        said = (done.stdout + done.stderr).strip()[-20_000:]
        yield SuiteOutcome(f"openapi.json::{name}", verdict, "" if passed else said)


def declared(_: Bench) -> Iterator[str]:
    yield from (f"openapi.json::{name}" for name in RUNS)


SUITE = Suite(
    name="schemathesis",
    title="Schemathesis",
    sources=(),
    requirements=("schemathesis==4.32.5",),
    run=run,
    declared=declared,
    ours=True,
)

"""``tensorflow_model_server_test.py``: TensorFlow Serving's own tests of its server, over the wire.

Its C++ tests of the REST API are restated in ``tests/conformance/test_tfserving_rest_handler.py``.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.peer_suites.sources import PinnedSource
from tests.peer_suites.suite import INSIDE, Bench, Suite, SuiteOutcome, declared_tests

SERVING = PinnedSource("tensorflow/serving", "9d981c5c2708d23c5407c7c1e30309e6f9798874")

_SERVERS = "tensorflow_serving/model_servers"
_DATA = "tensorflow_serving/servables/tensorflow/testdata"
_FILE = "tensorflow_model_server_test.py"
_CLASS = f"{_FILE}::TensorflowModelServerTest"
_MODELS = (
    "bad_half_plus_two",
    "saved_model_half_plus_two_cpu",
    "saved_model_half_plus_two_tf2_cpu",
    "saved_model_half_plus_two_tflite",
    "saved_model_half_plus_two_tflite_with_sigdef",
    "saved_model_half_plus_three",
)
#: Each test starts a server, and some train a model first.
_TEST_SECONDS = 300
_PROGRAM = """#!/bin/sh
exec env -u PYTHONPATH PYTHONPATH="{root}" "{python}" "{script}" "$@"
"""
NOT_APPLICABLE = {
    f"{_CLASS}::test_tf_text": "operators of TensorFlow Text, which are native code",
    f"{_CLASS}::test_session": "a helper of TensorFlow's, not a test",
}
NOT_SUPPORTED = {
    f"{_CLASS}::test_profiler_service_with_valid_trace_request": "TensorFlow's profiler",
}

EXPECTED_FAILURES = {
    f"{_CLASS}::testPredictWithSignatureDefOnTfLite": (
        "names from 'signature_defs_metadata', a format from before TensorFlow Lite had signatures"
    ),
}


def run(bench: Bench) -> Iterator[SuiteOutcome]:
    if not bench.wanted(_FILE):
        return
    source = bench.source(SERVING)
    root = bench.work / "tf_serving"
    servers, data = root / _SERVERS, root / _DATA
    servers.mkdir(parents=True)
    shutil.copy(source / _SERVERS / _FILE, servers / _FILE)
    shutil.copytree(source / _SERVERS / "test_util", servers / "test_util")
    for name in _MODELS:
        shutil.copytree(source / _DATA / name, data / name)
    for file in (source / _DATA).iterdir():
        if file.suffix in (".txt", ".json"):
            shutil.copy(file, data / file.name)
    program = servers / "tensorflow_model_server"
    script = INSIDE / "tensorflow_model_server.py"
    here = Path(__file__).parents[2]
    program.write_text(_PROGRAM.format(root=here, python=sys.executable, script=script))
    program.chmod(0o755)
    shutil.copy(INSIDE / "tensorflow_serving_conftest.py", servers / "conftest.py")
    environment = {
        "TEST_SRCDIR": str(bench.work),
        "TEST_TMPDIR": str(bench.work),
        "TF_USE_LEGACY_KERAS": "1",  # the file names inputs as Keras 2 does
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    yield from bench.pytest(servers / _FILE, _FILE, environment=environment, seconds=_TEST_SECONDS)


def declared(bench: Bench) -> Iterator[str]:
    yield from declared_tests(bench.source(SERVING) / _SERVERS / _FILE, _FILE)


SUITE = Suite(
    name="tensorflow-serving",
    title="TensorFlow Serving's tests of its server",
    sources=(SERVING,),
    requirements=(
        *("tensorflow-cpu==2.21.0", "tensorflow-serving-api==2.21.0", "tf-keras==2.21.0"),
        *("portpicker", "six"),
        *("pytest", "pytest-timeout"),
    ),
    run=run,
    not_applicable=NOT_APPLICABLE,
    not_supported=NOT_SUPPORTED,
    expected_failures=EXPECTED_FAILURES,
    declared=declared,
)

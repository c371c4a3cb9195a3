"""Set-up that bazel does for TensorFlow Serving's test file: packages, flags, eager execution.

Copied beside the file as ``conftest.py``. A server that the file starts is given time to load its
models, as the program that it means listens only after that; and few of them stay at a time.
"""

import json
import os
import time
import urllib.request
from pathlib import Path

import tensorflow as tf
import tensorflow_serving
from absl import flags

ROOT = Path(os.environ["TEST_SRCDIR"]) / "tf_serving" / "tensorflow_serving"
MAX_SERVERS = 2
READY_SECONDS = 50

tensorflow_serving.__path__.append(str(ROOT))

from tensorflow_serving.model_servers.test_util import (  # noqa: E402
    tensorflow_model_server_test_base as base,
)

tf.compat.v1.enable_eager_execution()
flags.FLAGS(["pytest"])
Path(flags.FLAGS.test_tmpdir).mkdir(parents=True, exist_ok=True)
SERVERS = base.TensorflowModelServerTestBase.model_servers_dict
START = base.TensorflowModelServerTestBase.RunServer.__func__


def run_server(cls, *arguments, wait_for_server_ready=True, **named):
    while len(SERVERS) > MAX_SERVERS:
        process, *_ = SERVERS.pop(next(iter(SERVERS)))
        process.kill()
        process.wait()
    started = START(cls, *arguments, wait_for_server_ready=wait_for_server_ready, **named)
    if wait_for_server_ready:
        wait(started[2])
    return started


def wait(address):
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        try:
            url = f"http://{address}/v2/repository/index"
            with urllib.request.urlopen(url, data=b"{}") as reply:
                rows = json.load(reply)
            if rows and all(row.get("state") == "READY" for row in rows):
                return
        except OSError:
            pass
        time.sleep(0.2)


base.TensorflowModelServerTestBase.RunServer = classmethod(run_server)

"""Set-up that bazel does for TensorFlow Serving's test file: packages, flags, eager execution.

Copied beside the file as ``conftest.py``. A server that the file starts ends the earlier ones,
which would keep their memory, and the socket that all are given.
"""

import os
from pathlib import Path

import tensorflow as tf
import tensorflow_serving
from absl import flags

ROOT = Path(os.environ["TEST_SRCDIR"]) / "tf_serving" / "tensorflow_serving"

tensorflow_serving.__path__.append(str(ROOT))

from tensorflow_serving.model_servers.test_util import (  # noqa: E402
    tensorflow_model_server_test_base as base,
)

tf.compat.v1.enable_eager_execution()
flags.FLAGS(["pytest"])
Path(flags.FLAGS.test_tmpdir).mkdir(parents=True, exist_ok=True)
SERVERS = base.TensorflowModelServerTestBase.model_servers_dict
KEY = base.GetArgsKey


def key_of_server(*arguments, **named):
    key = KEY(*arguments, **named)
    if key not in SERVERS:
        for process, *_ in SERVERS.values():
            process.terminate()
            process.wait()
        SERVERS.clear()
    return key


base.GetArgsKey = key_of_server

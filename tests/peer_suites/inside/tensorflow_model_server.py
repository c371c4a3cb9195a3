"""``tensorflow_model_server`` as TensorFlow Serving's tests start it: a gateway with its flags."""

import argparse
import os
import sys
import tempfile


def main() -> None:
    options = flags()
    seconds = options.rest_api_timeout_in_ms / 1000
    command = [sys.executable, "-m", "modelport", "serve"]
    command += ["--model-config-file", options.model_config_file or listed(options)]
    command += ["--http-port", str(options.rest_api_port), "--grpc-port", str(options.port)]
    command += ["--metrics-port", "0", "--max-request-timeout-secs", str(seconds)]
    # TensorFlow Serving polls base paths each second, and listens when the models are loaded.
    command += ["--model-control-mode", "poll", "--repository-poll-secs", "1"]
    command += ["--exit-on-error", "true"]
    for flag in ("model_config_file_poll_wait_seconds", "monitoring_config_file"):
        if value := getattr(options, flag):
            command += ["--" + flag.replace("_", "-"), str(value)]
    if options.grpc_socket_path:
        command += ["--grpc-socket", options.grpc_socket_path]
    os.execv(sys.executable, command)


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser("tensorflow_model_server")
    for name in ("port", "rest_api_port", "model_config_file_poll_wait_seconds"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--rest_api_timeout_in_ms", type=int, default=30000)
    for name in ("model_config_file", "monitoring_config_file", "model_base_path"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--model_name", default="default")
    parser.add_argument("--grpc_socket_path", default="")
    for ignored in ("prefer_tflite_model", "grpc_channel_arguments"):
        parser.add_argument(f"--{ignored}", default="")
    return parser.parse_args()


def listed(options: argparse.Namespace) -> str:
    """A file with the one model of ``--model_name`` and ``--model_base_path``."""
    text = f'name: "{options.model_name}" base_path: "{options.model_base_path}"'
    with tempfile.NamedTemporaryFile("w", suffix=".config", delete=False) as file:
        file.write(f"model_config_list {{ config {{ {text} }} }}")
    return file.name


if __name__ == "__main__":
    main()

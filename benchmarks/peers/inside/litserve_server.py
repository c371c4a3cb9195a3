"""Runs inside the `litserve` environment: litserve_server.py MODEL PORT."""

import sys
from typing import Any

import litserve
from plain import Plain


class LitServeModel(litserve.LitAPI):
    """The model."""

    def setup(self, device: str) -> None:
        self._plain = Plain(sys.argv[1])

    def decode_request(self, request):  # FastAPI would act on an annotation
        return request

    def predict(self, x: dict[str, Any]) -> dict[str, Any]:
        return self._plain.json(x)

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    server = litserve.LitServer(LitServeModel(), accelerator="cpu", timeout=False, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[2]),
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )

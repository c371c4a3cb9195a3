"""Runs inside the `litserve` environment: litserve_increment.py PORT."""

import sys
from typing import Any

import litserve
import numpy as np
from increment import increment


class IncrementApi(litserve.LitAPI):
    """``increment`` for lists of numbers."""

    def setup(self, device: str) -> None:
        """There is nothing to load."""

    def decode_request(self, request):  # FastAPI would act on an annotation
        return np.array(request["x"], np.float32)

    def predict(self, x: Any) -> Any:
        return increment(x)

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"output": output.tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(IncrementApi(), accelerator="cpu", timeout=False, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )

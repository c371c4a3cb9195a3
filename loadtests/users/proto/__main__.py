"""``make protos``: generate the messages beside this file, or below ``[FOLDER]``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[3]


def main() -> int:
    target = sys.argv[1] if len(sys.argv) > 1 else str(ROOT)
    # In its own process: two copies of protobuf's C++ library cannot share one.
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}"]
    source = str((HERE / "messages.proto").relative_to(ROOT))
    return subprocess.call(
        [*protoc, f"--python_out={target}", f"--pyi_out={target}", source], cwd=ROOT
    )


if __name__ == "__main__":
    raise SystemExit(main())

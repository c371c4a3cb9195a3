"""``make protos``: generate the messages from the ``.proto`` files in this folder.

python -m modelport.gateway.wire.proto [FOLDER]       # FOLDER: write below it instead
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
_DEFAULT = "_descriptor_pool.Default()"
_IMPORTS = "# @@protoc_insertion_point(imports)\n"


def main() -> int:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    sources = sorted(str(path.relative_to(ROOT)) for path in HERE.glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        # A separate process, because grpc_tools brings a second copy of protobuf's C++ library.
        protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}"]
        protoc += [f"--python_out={folder}", f"--pyi_out={folder}"]
        if code := subprocess.call([*protoc, *sources], cwd=ROOT):
            return code
        for made in sorted(Path(folder).rglob("*_pb2.py*")):
            text = made.read_text(encoding="utf-8")
            if made.suffix == ".py":
                if text.count(_DEFAULT) != 1 or text.count(_IMPORTS) != 1:
                    print(f"{made.name}: protoc's output has changed", file=sys.stderr)
                    return 1
                pool = "from modelport.gateway.wire.proto import pool as _pool\n"
                text = text.replace(_DEFAULT, "_pool.POOL").replace(_IMPORTS, _IMPORTS + pool)
            path = target / made.relative_to(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

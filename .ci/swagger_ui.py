"""Fetch the pinned release of Swagger UI from npm, and write its files for ``GET /docs``.

Run by ``make swagger-ui``. To take another release, change ``VERSION`` and ``INTEGRITY`` here, run
it, and put the printed values into ``gateway/protocols/api_pages.py``.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "5.35.0"
#: Of the archive, as the registry states it: npm view swagger-ui-dist@VERSION dist.integrity
INTEGRITY = (
    "sha512-U06rpMtW9V3XPGOBeamTUSr0Z09jMX4IJuANpE/EZbAh"
    "w0G8CgwrzU4YmXkn/h0wCDNsXdGarTNNHC3sU8yVUQ=="
)
FOLDER = Path(__file__).resolve().parents[1] / "gateway" / "protocols" / "swagger_ui"
#: Files for browsers, which are kept compressed, and the licences of what they contain.
SERVED = ("swagger-ui-bundle.js", "swagger-ui.css")
LICENCES = ("LICENSE", "NOTICE", "swagger-ui-bundle.js.LICENSE.txt")


def integrity(algorithm: str, content: bytes) -> str:
    digest = hashlib.new(algorithm, content).digest()
    return f"{algorithm}-{base64.b64encode(digest).decode()}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        name = f"swagger-ui-dist@{VERSION}"
        subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True)
        (file,) = Path(folder).iterdir()
        archive = file.read_bytes()
    if integrity("sha512", archive) != INTEGRITY:
        sys.exit(f"{name} is not the archive that INTEGRITY names")
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        for file_name in (*SERVED, *LICENCES):
            member = package.extractfile(f"package/{file_name}")
            assert member is not None
            content = member.read()
            if file_name in SERVED:
                print(f"{file_name}: {integrity('sha384', content)}")
                # Without a time, so that the same content is the same file.
                (FOLDER / f"{file_name}.gz").write_bytes(gzip.compress(content, 9, mtime=0))
            else:
                (FOLDER / file_name).write_bytes(content)


if __name__ == "__main__":
    main()

"""A certificate for the servers of a benchmark."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks import programs
from modelport.loadtests.system.processes import HOST


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for loopback, which this process trusts from now on."""
    openssl = programs.debian_program("openssl", "openssl")
    paths = folder / "tls.crt", folder / "tls.key"
    command = [
        *(openssl, "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
        *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-addext", f"subjectAltName=IP:{HOST}"),
        *("-out", str(paths[0]), "-keyout", str(paths[1])),
    ]
    subprocess.run(command, check=True, capture_output=True)
    paths[1].chmod(0o600)
    os.environ["SSL_CERT_FILE"] = str(paths[0])
    return paths

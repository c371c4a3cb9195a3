"""Installation of packages into the environment that runs this, by uv, as pip is configured.

    .venv/bin/python .ci/install.py --constraint constraints.txt "torch==2.13.0"

uv links packages from its cache, but reads neither pip's files nor its variables. A machine whose
pip is told of a mirror, a certificate or a folder of wheels gets the same packages from uv. uv's
own variables win. Run by the Makefile; only the standard library is needed.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
#: An option of pip → uv's variable, and what separates several values there.
VARIABLES = {
    "index-url": ("UV_INDEX_URL", " "),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", ""),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", ""),
    "client-cert": ("SSL_CLIENT_CERT", ""),
    "proxy": ("ALL_PROXY", ""),
    "default-timeout": ("UV_HTTP_TIMEOUT", ""),
    "timeout": ("UV_HTTP_TIMEOUT", ""),
}
#: Later ones win, as in pip.
SECTIONS = ("global", "install", ":env:")


def options(listing: str) -> dict[str, list[str]]:
    """The values of each option in the output of ``pip config list``."""
    found: dict[str, dict[str, list[str]]] = {section: {} for section in SECTIONS}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in found:
            found[section][option] = str(ast.literal_eval(value)).split()
    return {name: each for section in SECTIONS for name, each in found[section].items()}


def environment(configured: Mapping[str, list[str]]) -> dict[str, str]:
    """The variables that tell uv what pip is configured for."""
    made = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip's: all indexes are equal
    for option, (variable, separator) in VARIABLES.items():
        if values := configured.get(option):
            made[variable] = separator.join(map(os.path.expanduser, values))
    return made


def main(arguments: list[str]) -> int:
    listing = subprocess.run([*PIP, "config", "list"], check=True, capture_output=True, text=True)
    configured = options(listing.stdout)
    if importlib.util.find_spec("uv") is None:
        subprocess.run([*PIP, "install", "--constraint", "constraints.txt", "uv"], check=True)
    constraints = [word for file in configured.get("constraint", ()) for word in ("-c", file)]
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    known = {**environment(configured), **os.environ}
    return subprocess.run([*command, *constraints, *arguments], env=known).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

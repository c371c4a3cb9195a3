"""Write the software bill of materials of the package and its images as CycloneDX JSON.

Run by ``make sbom``, in an environment with cyclonedx-bom. Python distributions come from
constraints.txt with the hashes of ``deploy/docker/requirements``. Swagger UI, whose files are part
of the package, comes from ``.ci/swagger_ui.py``. The document is the same for the same pins, and is
checked against CycloneDX's schema.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import swagger_ui
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "deploy" / "docker" / "requirements"


def requirements() -> str:
    """Every pin, with its hashes where there are any."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    hashes: dict[str, str] = {}
    for file in sorted(REQUIREMENTS.glob("*.txt")):
        for name, found in re.findall(
            r"^([\w.-]+)==.*((?:\n .*)+)", file.read_text(), re.MULTILINE
        ):
            hashes[name] = re.sub(r"\\?\n\s*", " ", found)
    names = [re.sub(r"[-_.]+", "-", pin.partition("==")[0]) for pin in pins]
    return "".join(f"{pin}{hashes.get(name, '')}\n" for pin, name in zip(pins, names, strict=True))


def vendored() -> dict[str, Any]:
    """The component of Swagger UI."""
    algorithm, _, digest = swagger_ui.INTEGRITY.partition("-")
    assert algorithm == "sha512"
    reference = f"pkg:npm/swagger-ui-dist@{swagger_ui.VERSION}"
    return {
        "type": "library",
        "bom-ref": reference,
        "name": "swagger-ui-dist",
        "version": swagger_ui.VERSION,
        "purl": reference,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "hashes": [{"alg": "SHA-512", "content": base64.b64decode(digest).hex()}],
    }


def main(target: Path) -> None:
    command = [sys.executable, "-m", "cyclonedx_py", "requirements", "-"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--sv", "1.6", "--output-reproducible"]
    done = subprocess.run(
        command, input=requirements(), check=True, stdout=subprocess.PIPE, text=True
    )
    document = json.loads(done.stdout)
    document["components"].append(vendored())
    for component in document["components"]:
        component.pop("description", None)  # the line of the requirements
    init = (ROOT / "modelport" / "__init__.py").read_text()
    root = document["metadata"]["component"]
    (root["version"],) = re.findall(r'^__version__ = "(.+)"', init, re.MULTILINE)
    root["purl"] = f"pkg:pypi/modelport@{root['version']}"
    parts = [component["bom-ref"] for component in document["components"]]
    document["dependencies"] = [
        {"ref": root["bom-ref"], "dependsOn": parts},
        *({"ref": part} for part in parts),
    ]
    text = json.dumps(document, indent=2, sort_keys=True) + "\n"
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem is not None:
        sys.exit(f"the document is not CycloneDX 1.6: {problem}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    print(f"{target}: {len(document['components'])} components")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

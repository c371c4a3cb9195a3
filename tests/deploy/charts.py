"""The chart, rendered by the real helm."""

from __future__ import annotations

from pathlib import Path

from tests.deploy import DEPLOY, tools
from tests.deploy.manifests import Manifest, documents

CHART = DEPLOY / "helm" / "modelport"


def render(values: Path, *flags: str) -> list[Manifest]:
    rendered = tools.check(
        tools.helm(), "template", "demo", CHART, "-n", "ml", "-f", values, *flags
    )
    return documents("\n".join(x for x in rendered.splitlines() if "symbolic link" not in x))


def only(kind: str, manifests: list[Manifest], name: str = "demo-modelport") -> Manifest:
    (found,) = (m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name)
    return found

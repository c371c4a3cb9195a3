"""The templates for Argo Rollouts and Flagger."""

from __future__ import annotations

import re

import pytest
import yaml

from modelport.gateway.rollout.statistics.counts import StageCounts
from tests.deploy import DEPLOY
from tests.deploy.manifests import wrong
from tests.gateway.rollout.test_rollout_metrics import metrics, status

FILES = sorted((DEPLOY / "rollout").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_template_fits_the_schema_of_its_custom_resource(path: object) -> None:
    assert wrong(yaml.safe_load(path.read_text())) == []  # type: ignore[attr-defined]


def test_a_misspelt_key_of_a_template_is_found() -> None:
    template = yaml.safe_load((DEPLOY / "rollout" / "analysistemplate.yaml").read_text())
    template["spec"]["metrics"][0]["failureConditions"] = "true"
    assert "failureConditions" in str(wrong(template))


def test_the_queries_name_metrics_of_the_gateway() -> None:
    names = {name.partition("{")[0] for name in metrics(status(StageCounts()))}
    text = "".join(path.read_text() for path in FILES)
    queried = set(re.findall(r"modelport_rollout_\w+", text))
    assert queried
    assert queried <= names
    phases = set(re.findall(r'phase="(\w+)"', text))
    assert phases == {"promoted", "rolled_back"}

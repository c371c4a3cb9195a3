"""Kubernetes manifests, and the schemas of those that Kubernetes itself does not know."""

from __future__ import annotations

import gzip
import json
import shlex
from pathlib import Path
from typing import Any

import click
import jsonschema
import yaml

from modelport.gateway.cli.serve import serve

CRDS = Path(__file__).parent / "crds"
#: Kind → the schema's file; see crds/README.md.
SCHEMAS = {
    "ServiceMonitor": "servicemonitor_v1",
    "PrometheusRule": "prometheusrule_v1",
    "ServingRuntime": "servingruntime_v1alpha1",
    "InferenceService": "inferenceservice_v1beta1",
    "AnalysisTemplate": "analysistemplate_v1alpha1",
    "MetricTemplate": "metrictemplate_v1beta1",
}
Manifest = dict[str, Any]


def documents(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def wrong(manifest: Manifest) -> list[str]:
    """List violations of the schema of a custom resource, unknown keys included."""
    schema = json.loads(
        gzip.decompress((CRDS / f"{SCHEMAS[manifest['kind']]}.json.gz").read_bytes())
    )
    errors = jsonschema.Draft7Validator(schema).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]


def served_with(arguments: list[str] | str) -> dict[str, Any]:
    """The options that the real command line makes of ``serve ...``.

    Raises:
        click.UsageError: it does not take them.
    """
    words = shlex.split(arguments) if isinstance(arguments, str) else arguments
    assert words[0] == "serve", words
    context: click.Context = serve.make_context("serve", words[1:])
    return context.params

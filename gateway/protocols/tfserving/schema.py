"""Schemas of TensorFlow Serving's JSON for the OpenAPI document."""

from __future__ import annotations

from typing import Any


def _body(properties: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"signature_name": {"type": "string"}, **properties},
        "example": example,
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_EXAMPLES = _body(
    {
        "examples": {"type": "array", "items": {"type": "object"}},
        "context": {"type": "object", "description": "features that all examples share"},
    },
    {"examples": [{"x": [1.0, 2.0, 3.0, 4.0]}]},
)
#: Routes of a model: the end of the path, the name, the schema of a POST's request, description.
ROUTES: tuple[tuple[str, str, dict[str, Any] | None, str], ...] = (
    (
        ":predict",
        "predict",
        _body(
            {
                "instances": {"type": "array", "items": {}, "description": "a row an instance"},
                "inputs": {"description": "or columns: one tensor, or an object of them"},
            },
            {"instances": [[1.0, 2.0, 3.0, 4.0]]},
        ),
        "Run the model. `instances` (rows) return `predictions`, `inputs` (columns) `outputs`.",
    ),
    (
        ":explain",
        "explain",
        _body(
            {"instances": {"type": "array", "items": {}, "description": "a row an instance"}},
            {"instances": [[1.0, 2.0, 3.0, 4.0]]},
        ),
        "Run the model's explainer (KServe). `instances` return `explanations`.",
    ),
    (":classify", "classify", _EXAMPLES, "Return the labels and scores of each example."),
    (":regress", "regress", _EXAMPLES, "Return a value for each example."),
    (
        "",
        "state of the versions",
        None,
        "State of the versions, in the format of TensorFlow Serving.",
    ),
    ("/metadata", "signature", None, "Signature, in the format of TensorFlow Serving."),
)

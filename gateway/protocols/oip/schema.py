"""Models of OIP's JSON for the OpenAPI document; requests are not decoded with them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class OipServerMetadata(BaseModel):
    """Metadata of the server."""

    name: str
    version: str
    extensions: list[str]


class OipModels(BaseModel):
    """Names of models."""

    models: list[str]


class OipTensorMetadata(BaseModel):
    """Metadata of an input or output."""

    name: str
    datatype: str = Field(examples=["FP32"])
    shape: list[int] = Field(description="-1: dynamic; the batch dimension comes first")


class OipModelMetadata(BaseModel):
    """Metadata of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[OipTensorMetadata]
    outputs: list[OipTensorMetadata]


class OipTensor(BaseModel):
    """An input or output with its data."""

    name: str
    datatype: str = Field(examples=["FP32"])
    shape: list[int]
    data: list[Any] | None = Field(None, description="flat or nested, row-major")
    parameters: dict[str, bool | int | float | str] | None = Field(
        None, description="`binary_data_size`: the tensor follows the JSON as raw bytes"
    )


class OipRequestedOutput(BaseModel):
    """A requested output."""

    name: str
    parameters: dict[str, bool | int] | None = Field(
        None, description="`binary_data`: answer in bytes; `classification`: the top k instead"
    )


class OipInferRequest(BaseModel):
    """An inference request."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "42",
                "inputs": [
                    {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
                ],
            }
        }
    )
    id: str | None = None
    parameters: dict[str, bool | int | float | str] | None = Field(
        None, description="`timeout` in microseconds, `binary_data_output`, `priority`"
    )
    inputs: list[OipTensor]
    outputs: list[OipRequestedOutput] | None = None


class OipInferResponse(BaseModel):
    """An inference response."""

    id: str | None = None
    model_name: str
    model_version: str
    outputs: list[OipTensor]


def _body(schema: dict[str, Any], required: bool) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content}}


def _inline(schema: dict[str, Any]) -> dict[str, Any]:
    """Inline the ``$defs`` of ``schema``: an operation has no place for them."""
    definitions = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return resolve(definitions[value["$ref"].rpartition("/")[2]])
            return {key: resolve(item) for key, item in value.items()}
        return [resolve(item) for item in value] if isinstance(value, list) else value

    resolved: dict[str, Any] = resolve(schema)
    return resolved


INFER_BODY = _body(_inline(OipInferRequest.model_json_schema()), required=True)
ANY_BODY = _body({"type": "object"}, required=False)

"""The model configuration that ``auto_complete_config`` completes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_PROPERTIES = {
    "input": ("name", "data_type", "dims", "optional"),
    "output": ("name", "data_type", "dims"),
}
_NAMED = {
    "input": "'name', 'data_type', 'dims' and 'optional'",
    "output": "'name', 'data_type' and 'dims'",
}


class ModelConfig:
    """A model configuration. The methods raise ``ValueError`` if a value contradicts it."""

    def __init__(self, model_config: str) -> None:
        self._config: dict[str, Any] = json.loads(model_config)
        self._name = self._config.get("name", "")

    def as_dict(self) -> dict[str, Any]:
        """The configuration itself, in the JSON form of Triton's API."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        given = self._config.get("max_batch_size", 0)
        if given > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, but in auto-complete-config "
                f"function for model '{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Batch dynamically, unless the configuration names another scheduler."""
        if not {"sequence_batching", "ensemble_scheduling"} & self._config.keys():
            self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set whether the model is decoupled: ``{"decoupled": True}``."""
        if transaction_policy_dict.keys() - {"decoupled"}:
            raise ValueError(
                "model transaction property in auto-complete-config function for model "
                f"'{self._name}' contains property other than 'decoupled'."
            )
        if "decoupled" not in transaction_policy_dict:
            raise ValueError(
                "model transaction policy in auto-complete-config function for model "
                f"'{self._name}' is missing 'decoupled' property."
            )
        policy = self._config.setdefault("model_transaction_policy", {})
        decoupled = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", decoupled) != decoupled:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model "
                f"'{self._name}', which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = decoupled

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Declare an input: ``name``, ``data_type``, ``dims`` and ``optional``."""
        self._add("input", dict(input))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Declare an output: ``name``, ``data_type`` and ``dims``."""
        self._add("output", dict(output))

    def _add(self, kind: str, tensor: dict[str, Any]) -> None:
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                raise ValueError(
                    f"{kind} {self._quoted(tensor)}in auto-complete-config function for model "
                    f"'{self._name}' is missing '{key}' property."
                )
        if tensor.keys() - set(_PROPERTIES[kind]):
            raise ValueError(
                f"{kind} {self._quoted(tensor)}in auto-complete-config function for model "
                f"'{self._name}' contains property other than {_NAMED[kind]}."
            )
        declared = self._config.setdefault(kind, [])
        known = next((each for each in declared if each.get("name") == tensor["name"]), None)
        if known is None:
            declared.append(tensor)
            return
        datatype = known.get("data_type", "TYPE_INVALID")
        if datatype not in ("TYPE_INVALID", tensor["data_type"]):
            raise self._conflict(f"datatype {datatype}", kind, tensor, tensor["data_type"])
        dims = known.get("dims")
        if dims and list(dims) != list(tensor["dims"]):
            raise self._conflict(f"dims {dims}", kind, tensor, tensor["dims"])
        optional = tensor.get("optional", known.get("optional", False))
        if "optional" in tensor and known.get("optional", optional) != optional:
            raise self._conflict(
                f"optional {known['optional']}", kind, tensor, f"optional {optional}"
            )
        known.update(tensor)

    def _quoted(self, tensor: Mapping[str, Any]) -> str:
        return f"'{tensor['name']}' " if "name" in tensor else ""

    def _conflict(
        self, expected: str, kind: str, tensor: Mapping[str, Any], given: Any
    ) -> ValueError:
        return ValueError(
            f"unable to load model '{self._name}', configuration expects {expected} for {kind} "
            f"'{tensor['name']}', model provides {given}"
        )

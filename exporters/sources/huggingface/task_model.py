"""Any model of ``transformers`` for one task, with the signature found by running it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources.huggingface.model_facts import TaskInputs
from modelport.exporters.sources.huggingface.tasks import Part
from modelport.exporters.sources.input_bounds import edge
from modelport.exporters.sources.torch_eager import datatype_of, inference_mode
from modelport.gateway.types import NUMPY_DTYPES, Axis, ModelSignature, TensorSpec

BATCH = 2  # of the runs that find the signature, unless only one row is wanted
#: Sizes beyond the minimum in the two runs: convolutions may make one frame of many.
FURTHER = {2: 4, 3: 40}
#: Multiples of a sequence's minimum that are tried as the smallest that the model takes.
SHORTEST = (1, 2, 4, 8, 16, 32)
#: The axes of a model whose texts and images are batches of their own.
PAIRED = ("text_batch", "image_batch")
#: The output of models without a head.
FEATURES = "last_hidden_state"
#: Outputs that are left out where their weights are missing: another head was trained.
OPTIONAL = frozenset({"pooler_output"})


class TaskModel(nn.Module):
    """A model of ``transformers`` with tensors in the order of its signature.

    Args:
        inputs: names of ``forward``'s arguments, in order.
        outputs: the entries of the result to return, in order; those that a result lacks are left
            out until ``outputs`` is replaced by the names found.
    """

    #: The name of the task.
    task: str = ""

    def __init__(
        self, model: Any, part: Part, inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        super().__init__()
        self.part = part
        self.model = model.get_encoder() if part is Part.ENCODER else model
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs that the result has, in the order of ``outputs``."""
        result = self.results(dict(zip(self.inputs, tensors, strict=True)))
        return tuple(result[name] for name in self.outputs)

    def results(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Run the part of the model; return its result by name."""
        if self.part is Part.TEXT:
            return {"text_embeds": _pooled(self.model.get_text_features(**inputs))}
        if self.part is Part.IMAGE:
            return {"image_embeds": _pooled(self.model.get_image_features(**inputs))}
        if self.part is Part.DECODER:
            inputs = _decoder_arguments(inputs)
        result: Any = self.model(**inputs, **self._switches(), return_dict=True)
        return dict(_flat(result))

    def _switches(self) -> dict[str, bool]:
        """Without a cache, which would be a further output."""
        config = getattr(self.model, "config", None)
        return {"use_cache": False} if hasattr(config, "use_cache") else {}


def _pooled(features: Any) -> Tensor:
    """The embedding in a result; transformers 4 returns it alone."""
    pooled: Tensor = features if isinstance(features, Tensor) else features.pooler_output
    return pooled


def _flat(result: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of ``result``; the elements of a tuple have its name and their number."""
    for name, value in result.items():
        yield name, value
        if isinstance(value, tuple):
            yield from ((f"{name}_{number}", each) for number, each in enumerate(value))


def _decoder_arguments(inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    from transformers.modeling_outputs import BaseModelOutput

    return {
        "encoder_outputs": BaseModelOutput(last_hidden_state=inputs["encoder_hidden_states"]),
        "attention_mask": inputs["encoder_attention_mask"],
        "decoder_input_ids": inputs["input_ids"],
    }


class SignatureFinder:
    """Runs a model at chosen sizes, and finds the shapes of its outputs.

    Args:
        rows: of the largest batch.
        avoided: a token that marks padding, whose positions some models do not count.
    """

    def __init__(self, module: TaskModel, inputs: TaskInputs, rows: int, avoided: int) -> None:
        self._module = module
        self._inputs = inputs
        self._rows = rows
        self._avoided = avoided
        pairs = {name: Axis(name) for name in PAIRED} if inputs.pairs else {}
        self._axes: dict[str, Axis] = {**inputs.axes, **pairs}

    def find(self) -> tuple[ModelSignature, tuple[str, ...]]:
        """The signature, and the outputs that depend on weights which are NaN.

        Raises:
            Exception: that of ``forward`` if the model does not run.
        """
        self._limit()
        sizes = [{name: self._size(name, step) for name in self._axes} for step in (2, 3)]
        first, second = (self._run(chosen) for chosen in sizes)
        wanted = self._module.outputs
        found = [name for name in wanted if isinstance(first.get(name), Tensor)]
        if not found and FEATURES in wanted:  # a base model with heads of its own
            found = [name for name, value in first.items() if isinstance(value, Tensor)]
        if not found:
            raise ValueError(f"it returns {', '.join(first) or 'nothing'}")
        outputs = {
            name: TensorSpec(
                name,
                datatype_of(name, first[name]),
                self._dims(first[name].shape, second[name].shape, sizes),
            )
            for name in found
        }
        damaged = tuple(name for name in found if bool(first[name].isnan().any()))
        if set(damaged) <= OPTIONAL:
            outputs = {name: spec for name, spec in outputs.items() if name not in damaged}
        self._module.outputs = tuple(outputs)
        pairs = self._inputs.pairs
        axes = {
            name: replace(axis, maximum=self._rows) if name in PAIRED else axis
            for name, axis in self._axes.items()
        }
        signature = ModelSignature(
            self._inputs.specs, tuple(outputs.values()), 0 if pairs else self._rows, axes
        )
        return signature, tuple(name for name in damaged if name in outputs)

    def sample(self) -> dict[str, Tensor]:
        """The outputs for the inputs of the first run."""
        found = self._run({name: self._size(name, 2) for name in self._axes})
        return {name: found[name] for name in self._module.outputs}

    def _size(self, name: str, step: int) -> int:
        """A small size, different for each axis and step."""
        axis, place = self._axes[name], list(self._axes).index(name)
        wanted = max(axis.minimum * step, axis.minimum + FURTHER[step]) + place
        if axis.maximum is None:
            return wanted
        if step > 2:
            return min(wanted, axis.maximum)
        middle = (axis.minimum + axis.maximum) // 2
        return max(axis.minimum, min(wanted, middle - place))

    def _limit(self) -> None:
        """Bound the limited axis by what the model accepts: tables of positions may begin at 2, and
        layers that pool tokens need some."""
        name = self._inputs.limited
        if name is None or self._axes[name].maximum is None:
            return
        least, longest = self._axes[name].minimum, self._axes[name].maximum or 1
        others = {other: self._size(other, 2) for other in self._axes}

        def works(size: int) -> bool:
            return self._runs({**others, name: size})

        sizes = (least * times for times in SHORTEST)
        shortest = next((size for size in sizes if size <= longest and works(size)), least)
        shortest = edge(max(shortest // 2, least - 1), shortest, works)
        if not works(longest):
            longest = edge(longest, shortest, works)
        self._axes[name] = replace(self._axes[name], minimum=shortest, maximum=longest)

    def _runs(self, sizes: Mapping[str, int]) -> bool:
        try:
            self._run(sizes)
        except (IndexError, RuntimeError, ValueError):
            return False
        return True

    def _run(self, sizes: Mapping[str, int]) -> Mapping[str, Any]:
        rng = np.random.default_rng(0)
        inputs = {spec.name: self._draw(spec, sizes, rng) for spec in self._inputs.specs}
        with quiet(), inference_mode(self._module):
            return self._module.results(inputs)

    def _draw(self, spec: TensorSpec, sizes: Mapping[str, int], rng: np.random.Generator) -> Tensor:
        dims = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.dims)
        shape = dims if self._inputs.pairs else (min(BATCH, self._rows or BATCH), *dims)
        if NUMPY_DTYPES[spec.datatype].kind == "f":
            return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
        if spec.name.endswith("attention_mask"):
            return torch.ones(shape, dtype=torch.int64)
        assert isinstance(spec.maximum, int)
        ids = torch.from_numpy(rng.integers(0, spec.maximum, shape, endpoint=True))
        other = 0 if self._avoided else min(1, spec.maximum)
        return torch.where(ids == self._avoided, other, ids) if "input_ids" in spec.name else ids

    def _dims(
        self, first: Sequence[int], second: Sequence[int], sizes: Sequence[Mapping[str, int]]
    ) -> tuple[int | str, ...]:
        """Dims of an output from its shapes at two choices of sizes."""
        skipped = 0 if self._inputs.pairs else 1

        def dim(one: int, other: int) -> int | str:
            if one == other:
                return one
            same = (n for n in self._axes if (sizes[0][n], sizes[1][n]) == (one, other))
            return next(same, -1)

        return tuple(map(dim, first[skipped:], second[skipped:]))

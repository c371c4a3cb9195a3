"""Architectures drawn by a seed from other packages: no rule of the exporters was written for them.

They come from the auto-mappings of ``transformers`` (model types that the sweep does not have),
timm, torchvision, and the samples of PyTorch's own tests of its modules. What its own package does
not build at this size is not drawn, nor a model of texts whose layers do not fit each other then;
what else does not run counts as refused.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelport.exporters.runtime import torchvision_operators
from modelport.exporters.runtime.output_capture import quiet
from tests.sweep import transformers_models
from tests.sweep.catalogue import Architecture
from tests.sweep.transformers_models import TASKS, TransformersModel

#: Most parameters of a model that is drawn.
PARAMETERS = 8_000_000
SEED = 0
#: The side of images, where a model takes images of another side than it was made for.
SIDE = 64


def drawn(seed: int, count: int) -> Iterator[Architecture]:
    """Yield ``count`` architectures, as many from each package as it has.

    Raises:
        ImportError: timm or torchvision is not installed.
    """
    torchvision_operators.declare()
    sources = [_transformers(seed), _images("timm", seed), _images("torchvision", seed), _nn(seed)]
    by_turns = itertools.chain.from_iterable(itertools.zip_longest(*sources))
    yield from itertools.islice((row for row in by_turns if row is not None), count)


def _shuffled(names: list[Any], seed: int) -> list[Any]:
    return random.Random(seed).sample(names, len(names))


def _builds(build: Callable[[], nn.Module]) -> bool:
    """Say whether ``build`` gives a model of at most ``PARAMETERS``, which takes no memory here."""
    try:
        with warnings.catch_warnings(), quiet(), torch.device("meta"):
            warnings.simplefilter("ignore")
            return sum(p.numel() for p in build().parameters()) <= PARAMETERS
    except Exception:  # whatever another package raises
        return False


def _transformers(seed: int) -> Iterator[Architecture]:
    from transformers.models.auto import modeling_auto

    known = {row.model_type for row in transformers_models.MODELS}
    heads = [
        (name, head)
        for head in TASKS
        for name in getattr(modeling_auto, f"{_mapping(head)}_MAPPING_NAMES")
        if name not in known
    ]
    for model_type, head in _shuffled(heads, seed):
        row = TransformersModel(model_type, head, _sizes(model_type))
        if _builds(row.build) and _fits(row):
            kind = f"transformers, {row.kind}"
            yield Architecture(row.name, kind, row.write, row.original)


def _fits(row: TransformersModel) -> bool:
    """Say whether the layers of a model of texts fit each other at this size."""
    try:
        with warnings.catch_warnings(), quiet(), torch.no_grad():
            warnings.simplefilter("ignore")
            model = row.build()
            if model.main_input_name == "input_ids":
                known = inspect.signature(model.forward).parameters
                ids = torch.ones(2, 8, dtype=torch.int64)
                model(**{n: ids for n in ("input_ids", "decoder_input_ids") if n in known})
    except RuntimeError:
        return False
    except Exception:  # it needs further inputs
        return True
    return True


def _sizes(model_type: str) -> dict[str, int]:
    """Sizes that a model needs to run: an image that strides of 32 leave, a token for padding."""
    import transformers

    default = transformers.AutoConfig.for_model(model_type).to_dict()
    found = {} if default.get("pad_token_id", 0) is not None else {"pad_token_id": 0}
    return found | ({"image_size": SIDE} if type(default.get("image_size")) is int else {})


_SHORT = {
    "CTC": "CTC",
    "MaskedLM": "MASKED_LM",
    "CausalLM": "CAUSAL_LM",
    "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM",
}


def _mapping(head: str) -> str:
    """The start of a mapping's name: that of SequenceClassification has SEQUENCE_CLASSIFICATION."""
    if not head:
        return "MODEL"
    if head in _SHORT:
        return f"MODEL_FOR_{_SHORT[head]}"
    words = "".join(f"_{c}" if c.isupper() else c.upper() for c in head)
    return f"MODEL_FOR{words}"


@dataclass(frozen=True, slots=True)
class _Image:
    """A classifier of images by its name in timm or torchvision."""

    package: str
    name: str

    def build(self) -> nn.Module:
        if self.package == "timm":
            module: nn.Module = importlib.import_module("timm").create_model(
                self.name, pretrained=False, num_classes=7
            )
        else:
            models = importlib.import_module("torchvision.models")
            module = models.get_model(self.name, weights=None, num_classes=7)
        return module.eval()

    def write(self, folder: Path) -> list[str]:
        torch.manual_seed(SEED)
        module = self.build()
        transformers_models.perturb(module)
        torch.save(module.state_dict(), folder / "model.pth")
        small = ["--model-kwargs", f'{{"image_size": {SIDE}}}'] if self._takes_small() else []
        return [str(folder / "model.pth"), "--model", f"{self.package}:{self.name}", *small]

    def _takes_small(self) -> bool:
        try:
            with warnings.catch_warnings(), quiet(), torch.device("meta"), torch.no_grad():
                warnings.simplefilter("ignore")
                self.build()(torch.zeros(2, 3, SIDE, SIDE))
        except Exception:  # whatever another package raises
            return False
        return True

    def original(self, folder: Path) -> Callable[[Mapping[str, Any]], Any]:
        module = self.build()
        module.load_state_dict(torch.load(folder / "model.pth", weights_only=True))
        return lambda inputs: module(*inputs.values())


def _images(package: str, seed: int) -> Iterator[Architecture]:
    models = importlib.import_module("timm" if package == "timm" else "torchvision.models")
    names = models.list_models() if package == "timm" else models.list_models(module=models)
    for name in _shuffled(names, seed):
        row = _Image(package, name)
        if _builds(row.build):
            yield Architecture(f"{package}:{name}", f"{package}, image", row.write, row.original)


#: The factories of ``--model tests.sweep.drawn:NAME``, which are made by a draw.
_FACTORIES: dict[str, Callable[[], nn.Module]] = {}


def __getattr__(name: str) -> Any:
    if name not in _FACTORIES:
        raise AttributeError(name)
    return _FACTORIES[name]


_DATATYPES = {torch.float32: "FP32", torch.int64: "INT64", torch.bool: "BOOL"}


def _nn(seed: int) -> Iterator[Architecture]:
    from torch.testing._internal.common_modules import module_db

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        infos = _shuffled([info for info in module_db if "Lazy" not in info.name], seed)
        for info in infos:
            samples = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=False, training=False
            )
            row = _sampled(info.module_cls, random.Random(seed).choice(list(samples)))
            if row is not None:
                yield row


def _sampled(cls: type[nn.Module], sample: Any) -> Architecture | None:
    """A row for one sample, or None if its arguments are not tensors or it does not run alone."""
    built, given = sample.constructor_input, sample.forward_input
    if given.kwargs or not given.args:
        return None
    tensors = [arg for arg in given.args if isinstance(arg, torch.Tensor)]
    if len(tensors) < len(given.args) or any(t.dtype not in _DATATYPES for t in tensors):
        return None
    if any(0 in t.shape for t in tensors):
        return None

    def build() -> nn.Module:
        torch.manual_seed(SEED)
        return copy.deepcopy(cls(*built.args, **built.kwargs)).eval()

    try:
        with torch.no_grad():
            build()(*[t.detach() for t in tensors])
    except Exception:  # whatever the module raises on its own sample in evaluation
        return None
    name = cls.__name__
    _FACTORIES[name] = build
    flags: list[str] = []
    for index, tensor in enumerate(tensors):
        dims = ",".join(map(str, tensor.shape))
        limits = f"={int(tensor.min())}..{int(tensor.max())}" if tensor.dtype == torch.int64 else ""
        flags += ["--input", f"input{index}:{_DATATYPES[tensor.dtype]}[{dims}]{limits}"]

    def write(folder: Path) -> list[str]:
        module = build()
        torch.save(module.state_dict(), folder / "model.pth")
        arguments = [str(folder / "model.pth"), "--model", f"{__name__}:{name}"]
        return [*arguments, *flags, "--max-batch-size", "0"]

    def original(folder: Path) -> Callable[[Mapping[str, Any]], Any]:
        module = build()
        return lambda inputs: module(*inputs.values())

    return Architecture(f"torch.nn.{name}", "torch.nn, a sample of its tests", write, original)

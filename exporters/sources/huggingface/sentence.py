"""Folders of ``sentence_transformers``: a transformer, then pooling and what follows it.

``modules.json`` lists the modules; their code here follows their configurations, and none of the
library's or the folder's is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelport.exporters.loaded_model import Origin, Source, digest_of
from modelport.exporters.sources import SourceRequest, checkpoint
from modelport.exporters.sources.huggingface import pretrained, tasks, transformer
from modelport.exporters.sources.huggingface.folder import (
    CONFIG,
    Folder,
    open_model,
    parse_json,
    read_bytes,
    read_json,
    weight_files,
)
from modelport.exporters.sources.huggingface.task_model import TaskModel
from modelport.exporters.sources.huggingface.tasks import Choice, Part
from modelport.gateway.errors import IntegrityError, Unsupported, UsageError

MODULES = "modules.json"
LENGTHS = ("sentence_bert_config.json", "sentence_xlnet_config.json")
LIBRARY = "sentence_transformers."

TOKENS, SENTENCE = "token_embeddings", "sentence_embedding"
#: The outputs of each task, as in Optimum; the embedding alone is what a search needs.
OUTPUTS: Mapping[str | None, tuple[str, ...]] = {
    None: (SENTENCE,),
    tasks.SENTENCE_SIMILARITY: (SENTENCE,),
    "feature-extraction": (TOKENS, SENTENCE),
}

_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    name: getattr(nn, name) for name in ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
}


@dataclass(frozen=True, slots=True)
class SentenceModule:
    """One entry of ``modules.json``: the last part of its type, and its folder."""

    kind: str
    path: Path


def is_sentence_model(path: Path) -> bool:
    return (path / MODULES).is_file()


def load(path: Path, request: SourceRequest) -> tuple[Source, Path]:
    """Load the transformer in ``path`` with its pooling and the modules after it.

    Returns:
        The model, and the folder of its transformer, which has the tokenizer.

    Raises:
        UsageError: the folder lacks something.
        Unsupported: a module is of a type that is not known.
        IntegrityError: a file is damaged, or names code.
    """
    first, *others = _modules(path)
    if first.kind != "Transformer" or not others or others[0].kind != "Pooling":
        raise Unsupported(
            f"'{path}' begins with {', '.join(m.kind for m in (first, *others[:1]))}; only a "
            "Transformer with a Pooling is exported"
        )
    folder = open_model(first.path)
    pooling = Pooling(others[0].path / CONFIG)
    after = [_stage(module) for module in others[1:]]
    choice = tasks.choose(folder, "feature-extraction")
    task = replace(
        choice.task, name=tasks.SENTENCE_SIMILARITY, outputs=OUTPUTS[request.task], mappings=()
    )

    def make(model: Any, part: Part, inputs: Sequence[str], outputs: Sequence[str]) -> TaskModel:
        return SentenceModel(model, part, inputs, outputs, pooling, nn.Sequential(*after))

    files = [path / MODULES, *folder.files, *(f for m in others for f in _files(m))]
    lengths = [first.path / name for name in LENGTHS if (first.path / name).is_file()]
    found = transformer.load(
        folder,
        replace(request, model_kwargs={**_longest(folder, lengths), **request.model_kwargs}),
        Choice(task, choice.class_name),
        make,
        Origin(path.resolve().name, digest_of(path, [*files, *lengths])),
    )
    spec = replace(found.spec, name=transformer.model_name(path, "sentence"))
    return replace(found, spec=spec), first.path


def _modules(path: Path) -> list[SentenceModule]:
    listed = parse_json(path / MODULES, read_bytes(path / MODULES))
    try:
        found = [(str(entry["type"]), str(entry["path"])) for entry in listed]
    except (TypeError, LookupError) as error:
        raise IntegrityError(
            f"'{path / MODULES}' lists no modules; copy the folder again"
        ) from error
    for kind, name in found:
        if not kind.startswith(LIBRARY):
            raise IntegrityError(
                f"'{path}' names code of its own ('{kind}' in {MODULES}), which is not run; give "
                "--task feature-extraction the folder of its transformer"
            )
        if name not in ("", ".") and (Path(name).name != name or name == ".."):
            raise IntegrityError(f"'{path / MODULES}' lists '{name}', which is not a folder in it")
    if not found:
        raise IntegrityError(f"'{path / MODULES}' lists no modules; copy the folder again")
    return [SentenceModule(kind.rpartition(".")[2], path / name) for kind, name in found]


def _files(module: SentenceModule) -> list[Path]:
    """The files that determine what a module computes."""
    found = [module.path / CONFIG] if (module.path / CONFIG).is_file() else []
    return found + (list(weight_files(module.path)[0]) if module.kind == "Dense" else [])


def _longest(folder: Folder, files: Sequence[Path]) -> dict[str, int]:
    """The library's own limit of tokens, as ``max_positions``."""
    longest = next((read_json(file).get("max_seq_length") for file in files), None)
    if type(longest) is not int or longest < 1:
        return {}
    own = folder.config.get("max_position_embeddings")
    return {"max_positions": min(longest, own) if isinstance(own, int) else longest}


def _stage(module: SentenceModule) -> nn.Module:
    if module.kind == "Normalize":
        return Normalization()
    if module.kind == "Dropout":
        return nn.Identity()
    if module.kind == "Dense":
        return _dense(module.path)
    raise Unsupported(
        f"'{module.path.parent}' has a module {module.kind}, which is not exported; only Pooling, "
        "Dense, Dropout and Normalize are"
    )


def _dense(path: Path) -> nn.Module:
    """A linear layer and its activation; its sizes are the weights'."""
    config = read_json(path / CONFIG)
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = name.rpartition(".")[2]
    if activation not in _ACTIVATIONS or not name.startswith("torch.nn."):
        raise Unsupported(
            f"'{path}' has the activation '{name}'; only {', '.join(_ACTIVATIONS)} are exported"
        )
    if {config.get(f"module_{end}_name", SENTENCE) for end in ("input", "output")} != {SENTENCE}:
        raise Unsupported(
            f"'{path}' is not a layer of sentence embeddings; only those are exported"
        )
    state = {k: v for file in weight_files(path)[0] for k, v in checkpoint.read(file).state.items()}
    pretrained.check_numbers(state, f"'{path}'")
    weight, bias = state.get("linear.weight"), state.get("linear.bias")
    sizes = (config.get("out_features"), config.get("in_features"))
    fits = weight is not None and tuple(weight.shape) == sizes
    if weight is None or not fits or (bias is not None) != bool(config.get("bias", True)):
        raise UsageError(f"the weights in '{path}' do not fit its {CONFIG}; complete the folder")
    with torch.no_grad():
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        linear.load_state_dict({k.removeprefix("linear."): v for k, v in state.items()})
    return nn.Sequential(linear, _ACTIVATIONS[activation]())


class Normalization(nn.Module):
    """Embeddings of length one."""

    def forward(self, embedding: Tensor) -> Tensor:
        return nn.functional.normalize(embedding, dim=-1)


class Pooling(nn.Module):
    """Token embeddings to one for each text; several modes are concatenated, in this order.

    Args:
        path: the configuration, with ``pooling_mode`` or a flag for each mode.
    """

    MODES: Mapping[str, str] = {
        "cls": "pooling_mode_cls_token",
        "max": "pooling_mode_max_tokens",
        "mean": "pooling_mode_mean_tokens",
        "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
        "weightedmean": "pooling_mode_weightedmean_tokens",
        "lasttoken": "pooling_mode_lasttoken",
    }

    def __init__(self, path: Path) -> None:
        super().__init__()
        config = read_json(path)
        named = config.get("pooling_mode")
        wanted = [named] if isinstance(named, str) else named
        if wanted is None:
            wanted = [mode for mode, flag in self.MODES.items() if config.get(flag) is True]
        if not isinstance(wanted, list) or not wanted or not set(wanted) <= self.MODES.keys():
            raise Unsupported(
                f"'{path}' names no mode of pooling that is exported; they are "
                f"{', '.join(self.MODES)}"
            )
        self.modes = [mode for mode in self.MODES if mode in wanted]

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """``[B, T, D]`` and ``[B, T]`` to ``[B, modes * D]``."""
        held = mask.unsqueeze(-1).to(tokens.dtype)
        return torch.cat([self._pooled(mode, tokens, held) for mode in self.modes], dim=-1)

    def _pooled(self, mode: str, tokens: Tensor, held: Tensor) -> Tensor:
        if mode == "cls":
            return tokens[:, 0]
        if mode == "max":
            return torch.where(held != 0, tokens, torch.full_like(tokens, -1e9)).amax(1)
        positions = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        places = held * positions.to(tokens.dtype).unsqueeze(-1)
        if mode == "lasttoken":
            last = places.argmax(1, keepdim=True).expand(-1, 1, tokens.shape[2])
            return tokens.gather(1, last).squeeze(1)
        weights = places if mode == "weightedmean" else held
        total = weights.sum(1).clamp(min=1e-9)
        return (tokens * weights).sum(1) / (total.sqrt() if "sqrt" in mode else total)


class SentenceModel(TaskModel):
    """A transformer with pooling and the modules after it."""

    def __init__(
        self,
        model: Any,
        part: Part,
        inputs: Sequence[str],
        outputs: Sequence[str],
        pooling: Pooling,
        after: nn.Module,
    ) -> None:
        super().__init__(model, part, inputs, outputs)
        self.pooling = pooling
        self.after = after

    def results(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """The embeddings of the tokens and of the texts."""
        tokens = super().results(inputs)["last_hidden_state"]
        embedding = self.after(self.pooling(tokens, inputs["attention_mask"]))
        return {TOKENS: tokens, SENTENCE: embedding}

"""Causal language models from ``transformers``, with LoRA adapters merged by ``peft``.

LoRA: Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from modelport.exporters.loaded_model import Source
from modelport.exporters.models.causal_lm import DEFAULT_MAX_POSITIONS, CausalLanguageModel
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import SourceRequest, checkpoint, safetensors_header
from modelport.exporters.sources.huggingface_folder import Folder, open_adapters
from modelport.exporters.sources.pytorch import source
from modelport.gateway.cli.errors import ParityError, UsageError, missing_extra
from modelport.gateway.errors import IntegrityError, ModelportError, Unsupported

KEYS_NAMED = 3  # how many keys a message lists before it only counts
PROBE_TOKENS = 16

#: Accepted difference of logits, as a share of the largest: adding a product to a weight rounds
#: differently from adding two results.
MERGE_TOLERANCE = 1e-3

_IGNORED = frozenset({"auto_map", "return_dict", "output_attentions", "output_hidden_states"})

_LORA = "lora_"
_OTHER_BASE = "give the model that the adapters were trained on"


def load(folder: Folder, request: SourceRequest) -> Source:
    """Load the model in ``folder``, with the adapters of ``request.lora`` merged into it.

    The only hyper-parameter is ``max_positions``, the longest sequence: at most the model's own
    limit, and by default no more than ``DEFAULT_MAX_POSITIONS``.

    Raises:
        UsageError: weights, adapters and configuration do not fit together.
        Unsupported: ``transformers`` does not know the model, or is not installed.
        IntegrityError: a file is damaged, or wants to run code.
        ParityError: merging the adapters changes the model's outputs.
    """
    unknown = sorted(set(request.model_kwargs) - {"max_positions"})
    if unknown:
        raise UsageError(
            f"--model-kwargs: causal-lm has no {', '.join(unknown)}, only max_positions; the rest "
            "is in config.json"
        )
    adapters = None if request.lora is None else _open_adapters(request.lora)
    model = _build(folder)
    _check_numbers(model.state_dict(), f"'{folder.path}'")
    origins = [folder.origin]
    if adapters is not None:
        model = _merge(model, adapters)
        origins.append(adapters.origin)
    config = model.config.get_text_config()
    longest = _longest(config)
    wanted = request.model_kwargs.get("max_positions", min(longest, DEFAULT_MAX_POSITIONS))
    if not isinstance(wanted, int) or not 1 <= wanted <= longest:
        raise UsageError(
            f"--model-kwargs: max_positions is {wanted!r}; '{folder.path}' takes 1 to {longest}"
        )
    module = CausalLanguageModel(model, config.vocab_size, wanted)
    spec = module.modelport_spec
    signature = spec.signature(module, request.max_batch_size)
    return source(module, spec, signature, tuple(origins), {"max_positions": wanted})


def _open_adapters(path: Path) -> Folder:
    adapters = open_adapters(path)
    kind = adapters.config.get("peft_type")
    if kind != "LORA":
        raise Unsupported(f"--lora '{path}' holds {kind} adapters; only LORA is merged")
    return adapters


def _build(folder: Folder) -> Any:
    """Build the ``PreTrainedModel`` in ``folder`` and load its weights strictly."""
    try:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    except ImportError as error:
        raise missing_extra(error) from error

    kind = str(folder.config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        code = ", and the code that comes with it is not run" if "auto_map" in folder.config else ""
        raise Unsupported(
            f"'{folder.path}' holds a model of type '{kind}', which transformers does not know"
            f"{code}; use a model that it knows"
        )
    # transformers only says that a pickle is bad; this names the code in it.
    for file in folder.weights:
        if file.suffix in checkpoint.PICKLED:
            checkpoint.read(file)
        else:
            safetensors_header.check(file)
    with _translated(f"'{folder.path}'", Unsupported):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder.path,
            config=CONFIG_MAPPING[kind].from_dict(_architecture(folder.config)),
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the report lists them
        )
    model, report = loaded
    problems = {
        "missing": sorted(report["missing_keys"]),
        "unexpected": sorted(report["unexpected_keys"]),
        "wrongly shaped": sorted(str(key) for key, *_ in report["mismatched_keys"]),
    }
    if any(problems.values()):
        raise UsageError(
            f"the weights in '{folder.path}' do not fit its config.json: {_list(problems)}; "
            "complete the folder"
        )
    return model.eval()


def _architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without the settings of implementation, which are chosen here.

    An attention "implementation" may name a repository whose kernels would be fetched and run.
    """
    kept = {}
    for key, value in config.items():
        if key not in _IGNORED and "implementation" not in key:
            kept[key] = _architecture(value) if isinstance(value, dict) else value
    return kept


def _merge(model: Any, adapters: Folder) -> Any:
    """Add the adapters' products to the weights of ``model``, in place."""
    try:
        import peft
    except ImportError as error:
        raise missing_extra(error) from error

    subject = f"--lora '{adapters.path}'"
    state = adapters.state()
    _check_numbers(state, subject)
    with _translated(subject, UsageError):
        config = peft.PeftConfig.from_pretrained(str(adapters.path))
        config.inference_mode = True
        adapted = peft.PeftModel(model, config).eval()
        loaded: Any = peft.set_peft_model_state_dict(adapted, state)
        problems = {
            "missing": [key for key in loaded.missing_keys if _LORA in key],
            "unexpected": loaded.unexpected_keys,
        }
        if any(problems.values()):
            raise UsageError(f"{subject} does not fit the model: {_list(problems)}; {_OTHER_BASE}")
        expected = _probe(adapted)
        merged = adapted.merge_and_unload().eval()
        found = _probe(merged)
    difference, scale = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= MERGE_TOLERANCE * scale:
        raise ParityError(
            f"{subject}: merging the adapters changes logits by {difference:.3g} of {scale:.3g}; "
            "an adapted weight is shared with another layer: train adapters that leave it out"
        )
    return merged


def _probe(model: Any) -> Tensor:
    """Logits of a fixed sequence."""
    config = model.config.get_text_config()
    count = min(PROBE_TOKENS, config.vocab_size, _longest(config))
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.arange(count).unsqueeze(0), use_cache=False).logits
    return logits


def _longest(config: Any) -> int:
    """The model's own longest sequence, or the default if it has none."""
    longest: int = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_POSITIONS
    return longest


@contextmanager
def _translated(subject: str, otherwise: type[ModelportError]) -> Iterator[None]:
    """Silence the libraries, and report their errors in one line about ``subject``."""
    try:
        with quiet():
            yield
    except ModelportError:
        raise
    except (safetensors.SafetensorError, pickle.UnpicklingError, EOFError) as error:
        raise IntegrityError(
            f"{subject}: a weight file is damaged ({_reason(error)}); copy the folder again"
        ) from error
    except ImportError as error:
        raise Unsupported(f"{subject} needs a library: {_reason(error)}") from error
    except Exception as error:
        raise otherwise(f"{subject} cannot be loaded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"there is no {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] or type(error).__name__


def _check_numbers(state: Mapping[str, Tensor], subject: str) -> None:
    for key, value in state.items():
        if value.is_floating_point() and bool(torch.isnan(value).any()):
            raise IntegrityError(f"{subject}: '{key}' contains NaN; use an earlier checkpoint")


def _list(problems: Mapping[str, Sequence[str]]) -> str:
    parts = []
    for kind, keys in problems.items():
        rest = f" and {len(keys) - KEYS_NAMED} more" if len(keys) > KEYS_NAMED else ""
        if keys:
            parts.append(f"{len(keys)} {kind} keys: {', '.join(keys[:KEYS_NAMED])}{rest}")
    return "; ".join(parts)

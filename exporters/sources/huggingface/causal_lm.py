"""Causal language models from ``transformers``, with LoRA adapters merged by ``peft``.

LoRA: Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelport.exporters.errors import ParityError
from modelport.exporters.loaded_model import Source
from modelport.exporters.models.causal_lm import DEFAULT_MAX_POSITIONS, CausalLanguageModel
from modelport.exporters.sources import SourceRequest
from modelport.exporters.sources.huggingface import pretrained
from modelport.exporters.sources.huggingface.causal_lm_with_past import CachedLanguageModel
from modelport.exporters.sources.huggingface.folder import Folder, open_adapters
from modelport.exporters.sources.pytorch import source
from modelport.gateway.errors import Unsupported, UsageError
from modelport.gateway.extras import missing_extra

PROBE_TOKENS = 16

#: Accepted difference of logits, as a share of the largest: adding a product to a weight rounds
#: differently from adding two results.
MERGE_TOLERANCE = 1e-3

_LORA = "lora_"
_OTHER_BASE = "give the model that the adapters were trained on"


def load(folder: Folder, request: SourceRequest, with_past: bool = False) -> Source:
    """Load the model in ``folder``, with the adapters of ``request.lora`` merged into it.

    The only hyper-parameter is ``max_positions``, the longest sequence: at most the model's own
    limit, and by default no more than ``DEFAULT_MAX_POSITIONS``.

    Args:
        with_past: the key-value cache is an input and an output.

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
    origins = [folder.origin]
    if adapters is not None:
        model = _merge(model, adapters)
        origins.append(adapters.origin)
    config = model.config.get_text_config()
    longest = _longest(config)
    wanted = request.model_kwargs.get("max_positions", min(longest, DEFAULT_MAX_POSITIONS))
    if type(wanted) is not int or not 1 <= wanted <= longest:
        raise UsageError(
            f"--model-kwargs: max_positions is {wanted!r}; '{folder.path}' takes 1 to {longest}"
        )
    module: CausalLanguageModel | CachedLanguageModel
    if with_past:
        module = CachedLanguageModel(model, config.vocab_size, wanted, longest)
    else:
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
    config = pretrained.configuration(folder)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Unsupported(
            f"'{folder.path}' holds a model of type '{config.model_type}', which is not a causal "
            "language model; export it without --model causal-lm"
        )
    found = pretrained.load(folder, config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    pretrained.refuse_misfit(folder, found.missing, found.unexpected)
    with pretrained.translated(f"'{folder.path}'", Unsupported):
        pretrained.attends_otherwise(found.model, lambda: {"logits": _probe(found.model)})
    return found.model


def _merge(model: Any, adapters: Folder) -> Any:
    """Add the adapters' products to the weights of ``model``, in place."""
    try:
        import peft
    except ImportError as error:
        raise missing_extra(error) from error

    subject = f"--lora '{adapters.path}'"
    state = adapters.state()
    pretrained.check_numbers(state, subject)
    with pretrained.translated(subject, UsageError):
        config = peft.PeftConfig.from_pretrained(str(adapters.path))
        config.inference_mode = True
        adapted = peft.PeftModel(model, config).eval()
        loaded: Any = peft.set_peft_model_state_dict(adapted, state)
        problems = {
            "missing": [key for key in loaded.missing_keys if _LORA in key],
            "unexpected": loaded.unexpected_keys,
        }
        if any(problems.values()):
            raise UsageError(
                f"{subject} does not fit the model: {pretrained.listed(problems)}; {_OTHER_BASE}"
            )
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

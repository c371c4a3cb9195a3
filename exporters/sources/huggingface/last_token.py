"""Classifiers of texts by the hidden state of the last end-of-text token: BART's and T5's.

transformers selects the states of all such tokens by a mask, whose size depends on values, and
takes only batches whose texts have equally many. Here each text's last one is chosen by its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources.torch_eager import inference_mode

#: The texts that show that both ways give the same answers.
TEXTS, TOKENS = 3, 6


class LastTokenClassifier(nn.Module):
    """A classifier of ``transformers`` with an encoder and a decoder that both take the text.

    A text without an end-of-text token, which transformers refuses, is classified by its last
    position.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    @property
    def config(self) -> Any:
        return self._model.config

    def forward(self, input_ids: Tensor, **given: Any) -> dict[str, Tensor]:
        model = self._model
        if hasattr(model, "_shift_right"):  # T5's base model does not do it itself
            given["decoder_input_ids"] = model._shift_right(input_ids)
        states = model.base_model(input_ids=input_ids, **given)[0]
        length = input_ids.shape[1]
        ends = (input_ids == model.config.eos_token_id).to(torch.int64)
        last = (ends * length + torch.arange(length, device=input_ids.device)).argmax(1)
        chosen = states.gather(1, last.view(-1, 1, 1).expand(-1, 1, states.shape[2]))
        return {"logits": model.classification_head(chosen.squeeze(1))}


def by_place(model: Any) -> Any:
    """``model`` as a ``LastTokenClassifier`` if it is one, or else itself."""
    config = model.config
    ends = getattr(config, "eos_token_id", None)
    if not (hasattr(model, "classification_head") and type(ends) is int):
        return model
    found = LastTokenClassifier(model)
    generator = torch.Generator().manual_seed(0)
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (TEXTS, TOKENS), generator=generator)
    ids[:, 1::2] = torch.where(ids[:, 1::2] == ends, (ends + 1) % vocabulary, ids[:, 1::2])
    ids[:, ::2] = ends  # neither the first nor the last one
    ids[:, 0] = (ends + 1) % vocabulary
    try:
        with quiet(), inference_mode(model):
            theirs, ours = (each(input_ids=ids, use_cache=False) for each in (model, found))
    except Exception:  # it is a classifier of another kind
        return model
    same = torch.allclose(theirs["logits"], ours["logits"], rtol=1e-4, atol=1e-5)
    return found if same else model

"""The fraud transformer: from a sequence of card-transaction tokens to a probability of fraud."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modelport.exporters.model_spec import Decision, ModelSpec, Shape, count_blocks
from modelport.gateway.errors import UsageError
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec

LAYER_NORM_EPS = 1e-5


def _signature(module: Any, max_batch_size: int) -> ModelSignature:
    return ModelSignature(
        inputs=(
            TensorSpec("tokens", Datatype.INT64, ("sequence",), 0, module.vocab_size - 1),
            TensorSpec("seq_lens", Datatype.INT64, (1,), 1, "sequence", reshape=()),
        ),
        outputs=(TensorSpec("probability", Datatype.FP32, (1,), reshape=()),),
        max_batch_size=max_batch_size,
        # Tokens beyond ``seq_lens`` are masked: padding changes no score.
        axes={"sequence": Axis("sequence", 1, module.max_positions, padding=0)},
    )


def _infer_kwargs(shapes: Mapping[str, Shape], given: Mapping[str, Any]) -> dict[str, Any]:
    """All hyper-parameters but ``nhead``, which leaves no trace in a shape and must be given."""
    try:
        vocab_size, d_model = shapes["embedding.weight"]
        inferred = {
            "vocab_size": vocab_size,
            "d_model": d_model,
            "num_layers": count_blocks(shapes, "encoder.layers."),
            "dim_feedforward": shapes["encoder.layers.0.linear1.weight"][0],
            "max_positions": shapes["positions.weight"][0],
        }
    except (LookupError, ValueError) as error:
        raise UsageError(
            f"the checkpoint is not a fraud transformer's (no usable {error}); "
            "check --model, or give every hyper-parameter with --model-kwargs"
        ) from error
    if "nhead" not in given:
        raise UsageError(
            "the checkpoint does not say how many attention heads it was trained with; "
            "add --model-kwargs '{\"nhead\": N}'"
        )
    return inferred


class FraudTransformer(nn.Module):
    """Embedding, learned positions, transformer encoder, mean over the real tokens, sigmoid.

    Post-norm encoder layers with ReLU, as in Vaswani et al. 2017, "Attention Is All You Need".
    """

    modelport_spec = ModelSpec(
        name="fraud",
        signature=_signature,
        infer_kwargs=_infer_kwargs,
        atol=5e-6,
        rtol=1e-5,
        decision=Decision("probability", threshold=0.5),
        keras_port="modelport.exporters.keras_ports.fraud:PORT",
    )

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        nhead: int,
        num_layers: int,
        dim_feedforward: int,
        max_positions: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(max_positions, d_model)
        layer = nn.TransformerEncoderLayer(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            layer_norm_eps=LAYER_NORM_EPS,
            batch_first=True,
        )
        # Nested tensors zero the padding and the plain path does not: scores would depend on the
        # path that a runtime takes.
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, 1)

    def logits(self, tokens: Tensor, seq_lens: Tensor) -> Tensor:
        """Log-odds of fraud, float32 ``[B]``; arguments as for ``forward``."""
        length = tokens.shape[1]
        # A length of 0 would mask every key: some runtimes give NaN then, others a number.
        lengths = seq_lens.clamp(min=1, max=length)
        steps = torch.arange(length, device=tokens.device)
        padding = steps.unsqueeze(0) >= lengths.unsqueeze(1)
        hidden = self.embedding(tokens) + self.positions(steps)
        hidden = self.encoder(hidden, src_key_padding_mask=padding)
        real = (~padding).unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * real).sum(dim=1) / real.sum(dim=1)
        scores: Tensor = self.head(pooled).squeeze(-1)
        return scores

    def forward(self, tokens: Tensor, seq_lens: Tensor) -> Tensor:
        """Probability of fraud.

        Args:
            tokens: int64 ``[B, T]``, ids in ``[0, vocab_size)``, ``T`` at most ``max_positions``.
            seq_lens: int64 ``[B]``, the number of leading real tokens, clamped into ``[1, T]``.

        Returns:
            float32 ``[B]``.
        """
        return torch.sigmoid(self.logits(tokens, seq_lens))

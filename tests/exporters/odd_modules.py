"""Modules with unusual results, arguments, weights and operators, for the exporters to meet."""

from __future__ import annotations

import dataclasses
import functools
import random
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS = "tokens:INT64[n=1..9]=0..30"
POINTS = "x:FP32[4]"
SERIES = "x:FP32[n=1..9,4]"


class LinearWithFunction(nn.Module):
    """A linear layer, and a function of its module and the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(4, 4)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


@dataclasses.dataclass
class FieldedResult:
    """A result with fields."""

    logits: Tensor
    hidden: Tensor | None = None
    scores: tuple[Tensor, ...] = ()


Pair = namedtuple("Pair", ["mean", "spread"])


class Keywords(nn.Module):
    """Takes its inputs by keyword alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, *, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        return {"sum": self.fc(x if y is None else x + 2 * y)}


class Skips(nn.Module):
    """Has an optional argument before the one that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, y: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        assert x is not None
        result: Tensor = self.fc(x) if y is None else self.fc(y)
        return result


class NoiseGiven(nn.Module):
    """Takes its random numbers as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        return torch.where(x > 6, x + noise, self.fc(x))


class Tied(nn.Module):
    """An embedding whose weight is also the head's, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 4)
        self.head = nn.Linear(4, 31, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.embedding(tokens)) * self.scale
        return result


class Halves(nn.Module):
    """Weights in half precision; ``strict`` also takes its inputs so."""

    def __init__(self, dtype: torch.dtype, strict: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3).to(dtype)
        self.strict = strict
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x.to(self.dtype) if self.strict else x.to(self.fc.weight.dtype))
        return result


class Noisy(nn.Module):
    """Draws random numbers in a part of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), Drops())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


class Drops(nn.Module):
    """Dropout that was forgotten in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5)


class Chatty(nn.Module):
    """Prints, warns and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        print("hello")
        warnings.warn("beware", stacklevel=2)
        import logging

        logging.getLogger("odd").warning("careful")
        result: Tensor = self.fc(x)
        return result


class MixtureOfExperts(nn.Module):
    """A mixture of experts, of which the best two count."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(torch.softmax(self.gate(x), -1), 2)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        picked = torch.gather(every, -2, chosen[..., None].expand(*chosen.shape, 4))
        return (picked * weights[..., None]).sum(-2)


class MessagePassing(nn.Module):
    """Message passing over edges; nothing has a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        messages = self.fc(nodes)[edges[0]]
        return torch.zeros_like(nodes).index_add(0, edges[1], messages)


class Counts(nn.Module):
    """Keeps state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.fc(x) * self.calls
        return result


class Cached(nn.Module):
    """Returns a key-value cache, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> OrderedDict[str, Any]:
        key = self.fc(x)
        past = ((key, key * 2), (key * 3, None))
        return OrderedDict(logits=key.sum(-1), past_key_values=past, loss=None)


def _holding_itself(tensor: Tensor) -> dict[str, Any]:
    result: dict[str, Any] = {"y": tensor}
    result["itself"] = result
    return result


def weight_normed(old: bool) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        norm = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm
        return LinearWithFunction(lambda m, x: m.inner(m.fc(x)), inner=norm(nn.Linear(4, 4)))


def quantised() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        module = LinearWithFunction(lambda m, x: m.fc(x))
        return torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-untyped-call, no-any-return]


def compiled_inside() -> nn.Module:
    module = LinearWithFunction(lambda m, x: m.inner(m.fc(x)), inner=nn.Linear(4, 4))
    module.inner = torch.compile(module.inner, backend="eager")  # type: ignore[assignment]
    return module


def _loop(m: Any, x: Tensor) -> Tensor:
    while x.abs().sum() > 1:
        x = x / 2
    return x


def _data_dependent(m: Any, x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x - 1


def function(name: str) -> nn.Module:
    return LinearWithFunction(FUNCTIONS[name])


#: Results and operators, as functions of a module with a linear layer ``fc`` and of its input.
FUNCTIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "dict": lambda m, x: {"logits": m.fc(x), "hidden": x * 2},
    "dataclass": lambda m, x: FieldedResult(m.fc(x), None, (x * 2, x * 3)),
    "named_tuple": lambda m, x: Pair(m.fc(x), x.abs()),
    "nested": lambda m, x: (m.fc(x), [x * 2, (x * 3, None)], None),
    "one_of_a_tuple": lambda m, x: (m.fc(x),),
    "scalar_for_each": lambda m, x: m.fc(x).sum(-1),
    "top_k": lambda m, x: torch.topk(m.fc(x), 2),
    "argmax": lambda m, x: m.fc(x).argmax(-1),
    "sorted": lambda m, x: torch.sort(m.fc(x), -1),
    "threshold": lambda m, x: m.fc(x) > 0.1,
    "number": lambda m, x: {"y": m.fc(x), "count": 3},
    "nothing": lambda m, x: None,
    "text": lambda m, x: "hello",
    "no_name": lambda m, x: {"": m.fc(x)},
    "unprintable_name": lambda m, x: {"\ud800": m.fc(x)},
    "masked": lambda m, x: torch.masked.masked_tensor(m.fc(x), x > 0),
    "ragged": lambda m, x: torch.nested.nested_tensor([m.fc(x[0]), m.fc(x)[0]]),
    "input_name": lambda m, x: {"x": m.fc(x)},
    "deep": lambda m, x: functools.reduce(lambda inner, _: [inner], range(2000), m.fc(x)),
    "holds_itself": lambda m, x: _holding_itself(m.fc(x)),
    "complex": lambda m, x: torch.fft.fft(m.fc(x)),
    "spectrum": lambda m, x: torch.fft.rfft(m.fc(x)).abs(),
    "sparse": lambda m, x: m.fc(x).to_sparse(),
    "scalar_in_all": lambda m, x: m.fc(x).mean(),
    "batch_second": lambda m, x: m.fc(x).T,
    "empty": lambda m, x: m.fc(x)[:, :0],
    "cumulated": lambda m, x: m.fc(x).cumsum(-1),
    "loop": _loop,
    "data_dependent": _data_dependent,
    "not_a_number": lambda m, x: torch.log(m.fc(x)),
    "noise": lambda m, x: m.fc(x) + torch.randn_like(x),
    "python_noise": lambda m, x: m.fc(x) * random.random(),
    "negated_view": lambda m, x: torch.fft.rfft(m.fc(x)).conj().imag,
    "weight_too": lambda m, x: {"logits": m.fc(x), "scale": m.fc.weight},
    "in_place": lambda m, x: m.fc(x.add_(1)),
    "input_as_output": lambda m, x: (x, m.fc(x)),
    "same_twice": lambda m, x: [m.fc(x)] * 2,
    "bfloat16_inside": lambda m, x: m.fc(x).bfloat16(),
    "half_result": lambda m, x: m.fc(x).half(),
    "double_inside": lambda m, x: m.fc(x).double().cumsum(-1),
    "unique": lambda m, x: torch.unique(x),
    "einsum": lambda m, x: torch.einsum("bi,bj->bij", x, m.fc(x)),
    "numpy_inside": lambda m, x: torch.from_numpy(m.fc(x).numpy() * 2),
    "rarely_random": lambda m, x: torch.where(x > 6, x + torch.rand_like(x), m.fc(x)),
    "mean_of_rows": lambda m, x: m.fc(x) - x.mean(0),
    "thirds": lambda m, x: torch.div(x, 3, rounding_mode="trunc"),
    "raises": lambda m, x: 1 // 0,
    "exits": lambda m, x: exit(3),
    "recursive": lambda m, x: m(x),
}

#: Modules by name, with their inputs and further options.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], dict[str, Any]]] = {
    **{name: (lambda name=name: function(name), (POINTS,), {}) for name in FUNCTIONS},  # type: ignore[misc]
    "thirds": (lambda: function("thirds"), ("x:INT64[4]",), {}),
    "random_given": (NoiseGiven, (POINTS, "noise:FP32[4]=0..1"), {}),
    "weight_too": (lambda: function("weight_too"), ("x:FP32[3,4]",), {"max_batch_size": 0}),
    "keyword_only": (Keywords, ("y:FP32[4]", "x:FP32[4]"), {}),
    "skipped_argument": (Skips, (POINTS,), {}),
    "tied": (Tied, (TOKENS,), {}),
    "bfloat16_weights": (lambda: Halves(torch.bfloat16), (POINTS,), {}),
    "bfloat16_strict": (lambda: Halves(torch.bfloat16, True), (POINTS,), {}),
    "half_weights": (lambda: Halves(torch.float16), (POINTS,), {}),
    "half_strict": (lambda: Halves(torch.float16, True), (POINTS,), {}),
    "weight_normed": (lambda: weight_normed(False), (POINTS,), {}),
    "weight_normed_by_hook": (lambda: weight_normed(True), (POINTS,), {}),
    "quantised": (quantised, (POINTS,), {}),
    "compiled": (lambda: torch.compile(function("dict"), backend="eager"), (POINTS,), {}),  # type: ignore[dict-item, return-value]
    "compiled_inside": (compiled_inside, (POINTS,), {}),
    "random_part": (Noisy, (POINTS,), {}),
    "chatty": (Chatty, (POINTS,), {}),
    "mixture": (MixtureOfExperts, (SERIES,), {}),
    "graph": (
        MessagePassing,
        ("nodes:FP32[nodes=8..12,4]", "edges:INT64[2,edges=1..20]=0..7"),
        {"max_batch_size": 0},
    ),
    "keeps_state": (Counts, (POINTS,), {}),
    "cached": (Cached, (SERIES,), {}),
    "lstm": (lambda: nn.LSTM(4, 3, batch_first=True), (SERIES,), {"output_names": ["output_0"]}),
    "lstm_whole": (lambda: nn.LSTM(4, 3, batch_first=True), (SERIES,), {}),
}


def build(name: str) -> nn.Module:
    """The factory: ``--model-kwargs '{"name": ...}'``."""
    torch.manual_seed(0)
    return MODULES[name][0]()

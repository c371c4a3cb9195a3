"""Models of ``transformers``, built from a folder's configuration and loaded with its weights.

``transformers`` never sees the folder: the configuration is read and checked here, the weights come
from the guarded reader, and no code in the folder is run.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import safetensors
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from modelport.exporters.runtime import torchvision_operators
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import checkpoint
from modelport.exporters.sources.huggingface.folder import Folder
from modelport.gateway.errors import IntegrityError, ModelportError, Unsupported, UsageError
from modelport.gateway.extras import missing_extra

#: The ends of keys of weights; integers under other names may be positions.
WEIGHTS = (".weight", ".bias")

KEYS_NAMED = 3  # how many keys a message lists before it only counts

_IGNORED = frozenset({"auto_map", "return_dict", "output_attentions", "output_hidden_states"})
#: Settings that make transformers look for further files, in the folder or on the network.
_FETCHED = frozenset({"use_pretrained_backbone", "transformers_weights", "_name_or_path"})

#: Entries of a configuration that a constructor turns into as many objects.
_COUNTS = re.compile(r"layer|block|depth|stage|expert|num_labels|n_head|num_.{0,99}heads")
#: Counts and sizes that any folder may ask for, however small its weights are.
FREE_COUNT = 1 << 12
FREE_ELEMENTS = 1 << 22
FREE_MODULES = 1 << 16
MODULES_PER_TENSOR = 16
#: Elements of buffers, such as masks and tables of positions, that no file holds.
MOST_BUFFER_ELEMENTS = 1 << 28


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model and the keys by which its weights differ from the folder's.

    Attributes:
        missing: weights of the model that the folder lacks; their values are arbitrary.
        unexpected: weights in the folder that the model has no use for.
    """

    model: Any
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def check_known(folder: Folder) -> Any:
    """Raise ``Unsupported`` unless ``transformers`` is installed and knows the type of model.

    Returns:
        The class of its configuration.
    """
    torchvision_operators.declare()  # transformers imports it where it is installed
    try:
        with quiet():
            from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise missing_extra(error) from error

    kind = str(folder.config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        code = ", and the code that comes with it is not run" if "auto_map" in folder.config else ""
        raise Unsupported(
            f"'{folder.path}' holds a model of type '{kind}', which transformers does not support"
            f"{code}; use a model that it supports"
        )
    return CONFIG_MAPPING[kind]


def configuration(folder: Folder) -> Any:
    """The ``PretrainedConfig`` of ``folder``.

    Raises:
        Unsupported: ``transformers`` does not know the type, or is not installed.
        IntegrityError: the configuration asks for more than the weights can hold.
    """
    kind = check_known(folder)
    _check_counts(folder, folder.config, _tensor_count(folder))
    with translated(f"'{folder.path}'", Unsupported):
        return kind.from_dict(_architecture(folder.config))


def load(folder: Folder, config: Any, factory: Any) -> Pretrained:
    """Build ``factory``'s model for ``config``, and load the weights of ``folder`` in fp32.

    Args:
        factory: a class of ``transformers``, or one of its ``AutoModel`` classes.

    Raises:
        UsageError: a weight has another shape than the configuration says.
        Unsupported: ``transformers`` cannot build the model.
        IntegrityError: a file is damaged, wants to run code, or is too small for the configuration.
    """
    state = folder.state()
    check_numbers(state, f"'{folder.path}'")
    with translated(f"'{folder.path}'", Unsupported):
        _check_size(folder, config, factory, state)
        loaded: Any = factory.from_pretrained(
            None,
            config=config,
            state_dict=state,
            local_files_only=True,
            attn_implementation="eager",
            experts_implementation="batched_mm",  # the only one in operators that converters have
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the report lists them
        )
    model, report = loaded
    mismatched = sorted(str(key) for key, *_ in report["mismatched_keys"])
    missing, unexpected = (sorted(report[f"{kind}_keys"]) for kind in ("missing", "unexpected"))
    if mismatched:
        refuse_misfit(folder, missing, unexpected, mismatched)
    return Pretrained(model.eval(), tuple(missing), tuple(unexpected))


def attends_otherwise(model: Any, sample: Callable[[], Mapping[str, Tensor]]) -> bool:
    """Give ``model`` the attention that transformers runs by default if eager attention differs.

    Its own masks may fit one of the two alone: a mask of what is kept is no mask of what is added.

    Args:
        sample: runs the model.
    """
    eager = sample()
    try:
        model.set_attn_implementation("sdpa")
        default = sample()
        same = all(torch.allclose(eager[n], default[n], 1e-2, 1e-3, True) for n in eager)
    except Exception:  # the model has only one
        same = True
    if same:
        model.set_attn_implementation("eager")
    return not same


def refuse_misfit(
    folder: Folder,
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    mismatched: Sequence[str] = (),
    remedy: str = "complete the folder",
) -> None:
    """Raise ``UsageError`` if there are such keys."""
    problems = {"missing": missing, "unexpected": unexpected, "wrongly shaped": mismatched}
    if any(problems.values()):
        raise UsageError(
            f"the weights in '{folder.path}' do not fit its config.json: {listed(problems)}; "
            f"{remedy}"
        )


def _architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without the settings of implementation, which are chosen here.

    An attention "implementation" may name a repository whose kernels would be fetched and run.
    """
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key in _FETCHED:
            kept[key] = None if key != "use_pretrained_backbone" else False
        elif key not in _IGNORED and "implementation" not in key:
            kept[key] = _architecture(value) if isinstance(value, dict) else value
    return kept


# -- sizes ----------------------------------------------------------------------------------------


def _tensor_count(folder: Folder) -> int:
    """An upper bound for the number of tensors in ``folder``, from the sizes of its files."""
    return sum(file.stat().st_size for file in folder.weights) // 8


def _check_counts(folder: Folder, config: Mapping[str, Any], most: int) -> None:
    """Refuse counts of layers or labels that no weights of this size have.

    The constructor of a configuration makes lists as long as these.
    """
    for key, value in config.items():
        if isinstance(value, dict):
            _check_counts(folder, value, most)
            continue
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if type(number) is int and number > max(FREE_COUNT, most) and _COUNTS.search(key):
                raise IntegrityError(
                    f"'{folder.path}': {key} of config.json is {number}, more than weights of "
                    "this size can hold; copy the folder again"
                )


class _TooLargeError(Exception):
    """The model has more weights than its folder."""


def _check_size(folder: Folder, config: Any, factory: Any, state: Mapping[str, Tensor]) -> None:
    """Build the model without memory for its weights, and count them.

    A weight may be registered under two keys, so twice the folder's elements are allowed.
    """
    dense = (tensor for tensor in state.values() if tensor.layout is torch.strided)
    elements = sum(tensor.numel() for tensor in dense)

    def count(left: int) -> Any:
        def hook(_module: nn.Module, _name: str, value: Tensor | nn.Module | None) -> None:
            nonlocal left
            left -= value.numel() if isinstance(value, Tensor) else 1
            if left < 0:
                raise _TooLargeError

        return hook

    handles = (
        hooks.register_module_parameter_registration_hook(count(2 * elements + FREE_ELEMENTS)),
        hooks.register_module_buffer_registration_hook(count(MOST_BUFFER_ELEMENTS)),
        hooks.register_module_module_registration_hook(
            count(MODULES_PER_TENSOR * len(state) + FREE_MODULES)
        ),
    )
    try:
        with torch.device("meta"):
            build = getattr(factory, "_from_config", None) or factory.from_config
            build(config, attn_implementation="eager")
    except _TooLargeError:
        raise IntegrityError(
            f"'{folder.path}': its config.json describes a larger model than its weights hold "
            f"({elements} values); copy the folder again"
        ) from None
    finally:
        for handle in handles:
            handle.remove()


# -- messages -------------------------------------------------------------------------------------


@contextmanager
def translated(subject: str, otherwise: type[ModelportError]) -> Iterator[None]:
    """Silence the libraries, and report their errors in one line about ``subject``."""
    try:
        with quiet():
            yield
    except ModelportError:
        raise
    except (safetensors.SafetensorError, pickle.UnpicklingError, EOFError) as error:
        raise IntegrityError(
            f"{subject}: a weight file is damaged ({reason(error)}); copy the folder again"
        ) from error
    except ImportError as error:
        raise Unsupported(f"{subject} needs a library: {reason(error)}") from error
    except Exception as error:
        raise otherwise(f"{subject} cannot be loaded: {reason(error)}") from error


def reason(error: Exception) -> str:
    """A library's message in one line."""
    if isinstance(error, KeyError):
        return f"there is no {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] or type(error).__name__


def check_numbers(state: Mapping[str, Tensor], subject: str) -> None:
    """Raise ``IntegrityError`` if a weight is NaN, ``Unsupported`` if it is not a real number."""
    for key, value in state.items():
        if key.endswith(WEIGHTS):
            checkpoint.check_real(key, value, subject)
        if checkpoint.has_nan(value):
            raise IntegrityError(f"{subject}: '{key}' contains NaN; use an earlier checkpoint")


def listed(problems: Mapping[str, Sequence[str]]) -> str:
    """The first keys of each problem, and the number of the others."""
    parts = []
    for kind, keys in problems.items():
        rest = f" and {len(keys) - KEYS_NAMED} more" if len(keys) > KEYS_NAMED else ""
        if keys:
            parts.append(f"{len(keys)} {kind} keys: {', '.join(keys[:KEYS_NAMED])}{rest}")
    return "; ".join(parts)

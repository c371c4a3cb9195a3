"""The operators of PyTorch that an unsigned model may use."""

from __future__ import annotations

import re

import torch

from modelport.gateway.repository.artifact_checks import operator_lists
from modelport.gateway.repository.artifact_checks.torch_operators import is_pure

ALLOWED = operator_lists.read("aten_allowed")
REFUSED = operator_lists.read("aten_refused")
#: Training; processors that are not served here; sparse tensors of indices that nothing checks.
REFUSED_GROUPS = re.compile(
    r"\w+_backward(_\w+)?|\w+_jvp|miopen_\w+|\w*mps\w*|mkldnn_(reorder|rnn)\w+"
    r"|sparse_(resize\w*|\w+_tensor)|resize_as_sparse_?|copy_sparse_to_sparse_?"
)


def public() -> set[str]:
    """ATen's public operators in the registry of the torch that is installed."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    aten = {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
    return {name for name in aten if not name.startswith("_")}


def test_every_public_operator_of_torch_was_reviewed() -> None:
    reviewed = ALLOWED | REFUSED
    new = {name for name in public() - reviewed if not REFUSED_GROUPS.fullmatch(name)}
    assert not new, "review them; then list them in aten_allowed.txt or aten_refused.txt"


def test_no_operator_is_allowed_and_refused() -> None:
    assert not ALLOWED & REFUSED
    assert not [name for name in ALLOWED if REFUSED_GROUPS.fullmatch(name)]


def test_an_operator_that_nobody_reviewed_is_refused() -> None:
    assert is_pure("aten::add")
    for name in ("open_file", "from_file", "relu_backward", "sparse_csr_tensor"):
        assert not is_pure(f"aten::{name}")

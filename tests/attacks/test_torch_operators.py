"""The operators of PyTorch that an unsigned model may use."""

from __future__ import annotations

import torch

from modelport.gateway.repository.artifact_checks.aten_operators import (
    ALLOWED,
    REFUSED,
    REFUSED_GROUPS,
)
from modelport.gateway.repository.artifact_checks.torch_operators import is_pure


def public() -> set[str]:
    """ATen's public operators in the registry of the torch that is installed."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    aten = {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
    return {name for name in aten if not name.startswith("_")}


def test_every_public_operator_of_torch_was_reviewed() -> None:
    reviewed = ALLOWED | REFUSED
    new = {name for name in public() - reviewed if not REFUSED_GROUPS.fullmatch(name)}
    assert not new, "review them; then list them in aten_operators.ALLOWED or REFUSED"


def test_no_operator_is_allowed_and_refused() -> None:
    assert not ALLOWED & REFUSED
    assert not [name for name in ALLOWED if REFUSED_GROUPS.fullmatch(name)]


def test_an_operator_that_nobody_reviewed_is_refused() -> None:
    assert is_pure("aten::add")
    for name in ("open_file", "from_file", "relu_backward", "sparse_csr_tensor"):
        assert not is_pure(f"aten::{name}")

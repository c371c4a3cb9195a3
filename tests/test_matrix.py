"""The judgement of ``make matrix``: it sees one wrong bit, one wrong value, one wrong status."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from modelport.gateway.types import Array
from tests.matrix.__main__ import MatrixCell, check_row, markdown
from tests.matrix.backends import BackendRow
from tests.matrix.dialects import Asked, DialectColumn, Refused
from tests.torchserve.server import sources

pytestmark = pytest.mark.thorough

SOURCE = {"vit": sources()["vit"]}
ROW = BackendRow("a backend", {"vit": "vit-somewhere"})


def honest(asked: Asked) -> dict[str, Array]:
    image = asked.inputs["image"]
    if asked.model != "vit-somewhere":
        raise Refused("404", "unknown")
    if image.ndim != 4 or len(image) > asked.signature.max_batch_size:
        raise Refused("400", "wrong")
    return {name: np.array(x) for name, x in SOURCE["vit"].reference(asked.inputs).items()}


def judged(
    other: Callable[[Asked], dict[str, Array]], unknown: str = "404"
) -> dict[str, MatrixCell]:
    columns = {
        "first": DialectColumn(honest, "404", "400"),
        "other": DialectColumn(other, unknown, "400"),
    }
    return check_row(ROW, SOURCE, columns)


def spoilt(amount: float) -> Callable[[Asked], dict[str, Array]]:
    def ask(asked: Asked) -> dict[str, Array]:
        answer = honest(asked)
        answer["logits"][0, 0] += amount
        return answer

    return ask


def test_an_honest_backend_has_nothing_wrong() -> None:
    cells = judged(honest)
    assert [cell.wrong for cell in cells.values()] == [[], []]
    assert cells["first"].requests > 5
    assert "| a backend | 0.0e+00 | 0.0e+00 |" in markdown({"a backend": cells})


def test_a_value_out_of_tolerance_is_seen() -> None:
    assert any("is off by" in problem for problem in judged(spoilt(0.01))["other"].wrong)


def test_a_bit_that_differs_between_dialects_is_seen_within_tolerance() -> None:
    def ask(asked: Asked) -> dict[str, Array]:
        answer = honest(asked)
        answer["logits"][0, 0] = np.nextafter(answer["logits"][0, 0], np.float32(np.inf))
        return answer

    problems = judged(ask)["other"].wrong
    assert problems
    assert all("is not bit-equal to first" in problem for problem in problems)


def test_another_status_is_seen() -> None:
    problems = judged(honest, unknown="400")["other"].wrong
    assert [problem.split(":")[0] for problem in problems] == ["unknown model"]


def test_a_bad_request_that_is_answered_is_seen() -> None:
    def ask(asked: Asked) -> dict[str, Array]:
        good = asked.inputs["image"][:8]
        if good.ndim != 4:
            good = good[..., 0]
        return honest(dataclasses.replace(asked, inputs={"image": good}))

    assert any("answered, not 400" in problem for problem in judged(ask)["other"].wrong)


@pytest.mark.parametrize("wrong", [np.float64, np.float16])
def test_another_datatype_is_seen(wrong: type) -> None:
    def ask(asked: Asked) -> dict[str, Array]:
        return {name: x.astype(wrong) for name, x in honest(asked).items()}

    assert judged(ask)["other"].wrong

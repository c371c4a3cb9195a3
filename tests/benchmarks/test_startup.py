"""Measurement of start-up times."""

from __future__ import annotations

from benchmarks import startup

SAID = """\
import time: self [us] | cumulative | imported package
import time:       135 |        200 |   click.core
import time:        65 |        265 | click
22:45:25.132617 [info     ] listening                      http_port=33549
import time:       500 |        500 |   numpy._core
"""


def test_import_times_are_summed_by_package() -> None:
    assert startup.import_microseconds(SAID) == {"click": 200, "numpy": 500}


def test_a_ratio_is_shown_with_its_spread() -> None:
    assert startup.spread([1.5, 1.0, 3.0]) == "1.50 x (1.00 to 3.00)"

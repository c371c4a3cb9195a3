"""The known-bad gateways replace what there is: a name that has changed would break nothing."""

from __future__ import annotations

import inspect
import multiprocessing
import sys

from tests.rollout_faults import broken_gateway


def _names() -> set[str]:
    """Every attribute of the modules of rollouts, and of their classes."""
    found = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("modelport.gateway.rollout"):
            for attribute, value in list(vars(module).items()):
                found.add(f"{name}.{attribute}")
                if inspect.isclass(value):
                    found |= {f"{name}.{attribute}.{inner}" for inner in dir(value)}
    return found


def _apply_all() -> None:
    before = _names()
    for patch in broken_gateway.VARIANTS.values():
        patch()
    added = sorted(_names() - before)
    sys.exit(f"no such names: {added}" if added else 0)


def test_every_known_bad_gateway_replaces_functions_that_exist() -> None:
    process = multiprocessing.get_context("spawn").Process(target=_apply_all)
    process.start()
    process.join()
    assert process.exitcode == 0

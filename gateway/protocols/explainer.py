"""The model that explains another one: KServe's and TorchServe's ``explain``.

An explainer is a model like any other, in the repository or behind a route. The parameter
``explainer`` in the configuration of the model that it explains names it.
"""

from __future__ import annotations

from modelport.gateway.backends import parameters
from modelport.gateway.errors import Unsupported
from modelport.gateway.models.manager import ModelManager

PARAMETER = "explainer"


def of(manager: ModelManager, name: str, number: int = 0) -> str:
    """The explainer's name, of a version that serves; 0: the default.

    Raises:
        NotFound, Unavailable: no such version serves.
        Unsupported: it has none.
    """
    explainer = parameters.text(manager.get(name, number).config, PARAMETER, "")
    if not explainer:
        raise Unsupported(
            f"model '{name}' has no explainer; name one in the parameter '{PARAMETER}' of its "
            "config.pbtxt"
        )
    return explainer

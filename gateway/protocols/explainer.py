"""Explainers, for the ``explain`` endpoints of KServe and TorchServe.

An explainer is a model of the repository or of an upstream server, named by the parameter
``explainer`` in the configuration of the model that it explains.
"""

from __future__ import annotations

from modelport.gateway.backends import parameters
from modelport.gateway.errors import Unsupported
from modelport.gateway.models.model_view import ModelView

PARAMETER = "explainer"


def name_of(manager: ModelView, name: str, number: int = 0) -> str:
    """Return the name of a model version's explainer; version 0 is the default one.

    Raises:
        NotFound, Unavailable: The version is not served.
        Unsupported: It has no explainer.
    """
    explainer = parameters.text(manager.get(name, number).config, PARAMETER, "")
    if not explainer:
        raise Unsupported(
            f"model '{name}' has no explainer; name one in the parameter '{PARAMETER}' of its "
            "config.pbtxt"
        )
    return explainer

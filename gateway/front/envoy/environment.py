"""What the process that starts Envoy tells the Python in it: a variable of the environment.

Envoy's Python needs variables that would harm the programs which it starts in turn, and it does not
know where its own executable is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

_VARIABLE = "MODELPORT_ENVOY"


@dataclass(frozen=True, slots=True)
class Environment:
    """``admin``: the path of Envoy's administration. ``before``: variables as they were."""

    admin: str
    executable: str
    before: Mapping[str, str | None]

    def variables(self) -> dict[str, str]:
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def adopt(cls) -> Environment:
        """Read it, and put this process' environment back in order."""
        self = cls(**json.loads(os.environ.pop(_VARIABLE)))
        sys.executable = self.executable
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        return self

"""Runs inside the cluster's environment: Ray's own schema on a configuration. schema.py FILE.

The schema drops keys that it does not know; here they are errors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema


def dropped(written: Any, understood: Any, where: str = "") -> Iterator[str]:
    """The keys of ``written`` that ``understood`` has not."""
    if isinstance(written, dict):
        for key, value in written.items():
            if not isinstance(understood, dict) or key not in understood:
                yield f"{where}{key}"
            else:
                yield from dropped(value, understood[key], f"{where}{key}.")
    elif isinstance(written, list) and isinstance(understood, list):
        for index, value in enumerate(written):
            yield from dropped(value, understood[index], f"{where}{index}.")


def main(file: Path) -> None:
    written = yaml.safe_load(file.read_text())
    understood = ServeDeploySchema.model_validate(written).model_dump(exclude_unset=True)
    unknown = list(dropped(written, understood))
    for application in written["applications"]:
        for deployment in application["deployments"]:  # where it is any table so far
            if scaling := deployment.get("autoscaling_config"):
                known = AutoscalingConfig.model_validate(scaling).model_dump(exclude_unset=True)
                unknown += dropped(scaling, known, f"{deployment['name']}.autoscaling_config.")
    if unknown:
        sys.exit(f"{file}: Ray Serve knows no {', '.join(unknown)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

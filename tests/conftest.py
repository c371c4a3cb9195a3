"""Settings of every test: none depends on the CI system that runs it, nor on how long it takes."""

from __future__ import annotations

import os

from modelport.exporters import progress

os.environ.pop("GITHUB_ACTIONS", None)  # errors would be annotated as well
progress.LINE_SECONDS = 3600.0

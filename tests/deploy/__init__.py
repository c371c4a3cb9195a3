"""Tests of the files in ``deploy/``. `make deploy` runs all of them with the tools they need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"

#: Tests that install programs, build images or take long.
thorough = pytest.mark.skipif(
    not os.environ.get("MODELPORT_DEPLOY_TESTS"), reason="takes programs; `make deploy` runs it"
)

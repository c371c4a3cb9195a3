"""Runs inside the cluster's environment: ``serve status`` as lines of JSON. status.py ADDRESS."""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import ray
from ray import serve

PERIOD_SECONDS = 0.25


def main(address: str) -> None:
    ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="ERROR")
    while True:
        print(json.dumps(dataclasses.asdict(serve.status()), default=str), flush=True)
        time.sleep(PERIOD_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])

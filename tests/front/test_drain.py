"""The drain promise with Envoy, in short; ``make envoy`` runs the whole suites with it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.ledger import parameter, recorded
from tests.faults.probes import Repository, eventually
from tests.faults.traffic import dropped, failures, flowing


@pytest.mark.parametrize(("number", "loses"), [(signal.SIGTERM, False), (signal.SIGKILL, True)])
def test_sigterm_under_load_drops_no_request_and_sigkill_does(
    number: signal.Signals, loses: bool, tmp_path: Path
) -> None:
    (tmp_path / "repository").mkdir()
    repository = Repository(tmp_path / "repository")
    repository.version(2.0, backend="ledger", config=parameter("delay_seconds", 0.02))
    flags = ("--front", "envoy")
    with recorded(repository.root, tmp_path / "ledger", *flags) as (gateway, written):
        with flowing(gateway, (2.0,), ["http", "grpc"], each=4, until_refused=True) as traffic:
            eventually(lambda: traffic.each_has(5), "traffic flows")
            gateway.process.send_signal(number)
            assert (gateway.process.wait(30) == 0) is not loses
        assert len(failures(traffic.outcomes)) == 8, "each goes on until it is not answered"
        assert (dropped(traffic.outcomes, written.begun) != []) is loses
        assert (sorted(written.begun) != sorted(written.ended)) is loses

"""Results, tables, plots, and the place in the README."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.peers import (
    bench,
    document_block,
    models,
    plots,
    results,
    runtime_limit,
    tables,
)
from benchmarks.peers.results import PeerCase, PeerRow, PeerSample, Results
from modelport.loadtests import marked_block

BEGIN, END = marked_block.markers(document_block.BLOCK)
X2, FRAUD = (models.ALL[name] for name in ("x2", "fraud128"))


def sample(rate: float, p50: float = 1.0, p99: float = 2.0, failed: int = 0) -> PeerSample:
    return PeerSample(rate, failed, p50, p99)


def row(about: str = "about", **rates: list[float]) -> PeerRow:
    """`json_16=[...]` → the samples of that case."""
    cases = {
        PeerCase.of(key.replace("_", "-")): [sample(rate) for rate in some]
        for key, some in rates.items()
    }
    return PeerRow(about, None, cases)


@pytest.fixture
def measured() -> Results:
    hardware = {
        "cpu": "A Processor",
        "cores": 2,
        "server_core": 0,
        "client_core": 1,
        "system": "Linux 6",
        "python": "3.11",
        "load_average": [0.1, 0.2, 0.3],
    }
    found = Results(hardware, {"date": "2026-01-02"})
    found.models["x2"] = {
        "modelport": row(json_1=[4000, 5000], json_16=[12_000, 9000], grpc_16=[15_000, 16_000]),
        "bare": row(json_1=[8000, 8000], json_16=[18_000, 18_000], grpc_16=[20_000, 20_000]),
        "mlserver": row(json_1=[1000, 1000], json_16=[3000, 1000], grpc_16=[2000, 2000]),
        "triton": row(json_1=[2000, 2000], json_16=[6000, 6000], grpc_16=[5000, 5000]),
        "ray": PeerRow("broken", "it ended\nno | luck"),
    }
    found.models["fraud128"] = {
        runtime_limit.NAME: row(loop_1=[500, 400], loop_8=[900, 700], loop_32=[800, 800]),
        "modelport": row(json_16=[495, 396], grpc_16=[490, 400]),
        "modelport-batching": row(json_16=[810, 720], grpc_16=[855, 665]),
        "modelport-batching-apart": row(grpc_16=[900, 700]),
    }
    return found


def test_results_survive_the_file(measured: Results, tmp_path: Path) -> None:
    measured.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == measured


def test_ratios_are_of_each_round() -> None:
    """A slow round slows both sides, so the ratio of medians would differ."""
    assert results.ratio([100, 10, 50], [10, 1, 25]) == 10
    assert results.ratio([100], []) is None
    assert results.ratio([100, 100], [0, 50]) == 2


def test_the_best_batch_is_that_of_the_best_median(measured: Results) -> None:
    loops = results.by_hand(measured.models["fraud128"], runtime_limit.NAME)
    assert list(loops) == [1, 8, 32]
    assert results.best_batch({1: [1, 9, 1], 8: [2, 2, 2]}) == 8


def test_failed_requests_are_counted_and_shown(measured: Results) -> None:
    assert measured.failed == 0
    case = PeerCase("json", 16)
    measured.models["x2"]["triton"].cases[case] = [sample(10, failed=3)]
    assert measured.failed == 3
    assert tables.cell(measured.models["x2"]["triton"], case, []).endswith("FAILED 3")


def test_the_table_of_servers(measured: Results) -> None:
    lines = tables.servers(measured.models["x2"], X2).splitlines()
    assert lines[0].startswith("| server | HTTP JSON, 1 in flight | HTTP JSON, 16 in flight | gRPC")
    assert "10,500 (9,000-12,000) **6.50x** 1 / 2 ms" in lines[2]
    broken = next(line for line in lines if line.startswith("| ray"))
    assert "_it ended: no / luck_" in broken
    assert len({line.count("|") for line in lines}) == 1


def test_the_table_of_ratios(measured: Results) -> None:
    text = tables.ratios(measured.models["x2"])
    assert text is not None
    line = next(line for line in text.splitlines() if "HTTP JSON, 16" in line)
    assert line == ("| modelport, HTTP JSON, 16 in flight | 6.50x | 1.75x | 0.58x | 1 ms | 1 ms |")


def test_the_batcher_stands_beside_the_best_batch_by_hand(measured: Results) -> None:
    text = tables.batches(measured.models["fraud128"], FRAUD)
    assert text is not None
    table, shared, apart = text.split("\n\n")
    assert "| raw ONNX Runtime, rows/s | 450 | 800 | 800 |" in table
    size = f"`preferred_batch_size: [ {FRAUD.preferred_batch_size} ]`"
    for line in (shared, apart):
        assert size in line
    assert "against batch 8 by hand: HTTP JSON, 16 in flight: 765, **0.96x**" in shared
    assert (
        "its own, as by hand, against batch 8 by hand: gRPC, 16 in flight: 800, **1.00x**" in apart
    )


def test_the_baseline_of_models_that_compute_is_the_loop(measured: Results) -> None:
    text = tables.servers(measured.models["fraud128"], FRAUD)
    line = next(line for line in text.splitlines() if line.startswith("| modelport"))
    assert "**0.99x**" in line
    assert f"| {runtime_limit.NAME}" not in text


def test_every_plot_is_a_picture_with_its_names_in_it(measured: Results, tmp_path: Path) -> None:
    files = plots.draw(measured, tmp_path)
    assert [file.name for file in files.values()] == [
        "throughput.svg",
        "latency.svg",
        "share.svg",
        "batching.svg",
    ]
    for file in files.values():
        ElementTree.parse(file)
        assert file.stat().st_size < 60_000
    assert "mlserver" in (tmp_path / "throughput.svg").read_text()
    before = {file: file.read_bytes() for file in files.values()}
    plots.draw(measured, tmp_path)
    assert before == {file: file.read_bytes() for file in files.values()}


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert plots.draw(Results({}, {}), tmp_path) == {}


def test_the_report_replaces_what_stands_between_the_markers(
    measured: Results, tmp_path: Path
) -> None:
    file = tmp_path / "README.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):  # again: nothing grows
        document_block.write(measured, file, tmp_path / "docs" / "benchmarks")
        text = file.read_text()
        assert text.startswith(f"before\n{BEGIN}\nA Processor, 2 cores")
        assert text.endswith(f"{END}\nafter\n")
        assert "old" not in text
        assert text.count("](docs/benchmarks/throughput.svg)") == 1


def test_a_readme_without_markers_is_refused_and_left_alone(
    measured: Results, tmp_path: Path
) -> None:
    file = tmp_path / "README.md"
    file.write_text(f"{END} {BEGIN}")
    with pytest.raises(marked_block.NoMarkers, match="benchmark: begin"):
        document_block.write(measured, file, tmp_path)
    assert file.read_text() == f"{END} {BEGIN}"


def test_the_report_can_be_made_again_without_measuring(
    measured: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    measured.save(path)
    assert bench.main(["--report", str(path)]) == 0
    assert "**4 floats (y = 2x)**, 2 rounds." in capsys.readouterr().out

"""The tables of the report, as markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.peers import results, runtime_limit
from benchmarks.peers.model import PeerModel
from benchmarks.peers.results import PeerCase, PeerRow, Results, median, ratio

#: Core of the event loop of modelport with dynamic batching.
BATCHING = {
    "modelport-batching": "loop and model on one core",
    "modelport-batching-apart": "the model's core its own, as by hand",
}
REASON_LENGTH = 100


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def cell(row: PeerRow, case: PeerCase, baseline: Sequence[float]) -> str:
    """Median requests/s (lowest-highest), **ratio**, p50 / p99 milliseconds."""
    samples = row.cases.get(case, [])
    if not samples:
        return ""
    rates = row.rates(case)
    text = f"{figure(median(rates))} ({figure(min(rates))}-{figure(max(rates))})"
    found = ratio(rates, baseline)
    if found is not None:
        text += f" **{found:.2f}x**"
    p50 = median(sample.p50_ms for sample in samples)
    p99 = median(sample.p99_ms for sample in samples)
    text += f" {figure(p50)} / {figure(p99)} ms"
    failed = sum(sample.failed for sample in samples)
    return text + (f" FAILED {failed}" if failed else "")


def figure(value: float) -> str:
    """Format with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def servers(rows: Mapping[str, PeerRow], model: PeerModel) -> str:
    """One row for each server, one column for each protocol and load."""
    cases = [
        case
        for protocol in model.protocols
        for case in sorted({c for row in rows.values() for c in row.cases}, key=lambda c: c.load)
        if case.protocol == protocol
    ]
    one = PeerCase(results.LOOP, 1)
    lines = []
    for name, row in rows.items():
        if name == runtime_limit.NAME:
            continue
        told = [
            cell(
                row,
                case,
                rows[model.baseline].rates(one if model.baseline == runtime_limit.NAME else case),
            )
            if model.baseline in rows
            else cell(row, case, [])
            for case in cases
        ]
        if row.missing:
            told[told.index("") if "" in told else -1] += f"_{short(row.missing)}_"
        lines.append([f"{name} ({row.about})", *told])
    return markdown(["server", *(f"{case.title} in flight" for case in cases)], lines)


def short(reason: str) -> str:
    """A reason in one line, fit for a cell."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason"]
    text = lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}"
    return text[:REASON_LENGTH].replace("|", "/").replace("_", " ")


def batches(rows: Mapping[str, PeerRow], model: PeerModel) -> str | None:
    """Rows per second by batch size without a server, and of the batcher with 16 in flight."""
    loops = results.by_hand(rows, runtime_limit.NAME)
    best = results.best_batch(loops)
    if best is None or len(loops) < 2:
        return None
    head = ["", *(f"batch {batch}" for batch in loops)]
    told = [f"{figure(median(rates))}" for rates in loops.values()]
    lines = [["raw ONNX Runtime, rows/s", *told]]
    text = markdown(head, lines)
    for name, where in BATCHING.items():
        row = rows.get(name)
        if row is None:
            continue
        found = []
        for case in row.cases:
            rates = row.rates(case)
            share = ratio(rates, loops[best])
            if share is not None:
                found.append(f"{case.title} in flight: {figure(median(rates))}, **{share:.2f}x**")
        if row.missing:
            found.append(short(row.missing))
        size = f"`preferred_batch_size: [ {model.preferred_batch_size} ]`"
        text += f"\n\nmodelport with {size}, {where}, against batch {best} by hand: "
        text += "; ".join(found) + "."
    return text


def ratios(rows: Mapping[str, PeerRow]) -> str | None:
    """modelport beside MLServer, Triton and the bare handler."""
    name, lines = "modelport", []
    ours = rows.get(name, PeerRow(""))
    for case in ours.cases:
        others = [
            rows.get(other, PeerRow("")).rates(case) for other in ("mlserver", "triton", "bare")
        ]
        found = [ratio(ours.rates(case), rates) for rates in others]
        p50 = [_p50(rows.get(server), case) for server in (name, "triton")]
        told = ["" if value is None else f"{value:.2f}x" for value in found]
        told += ["" if value is None else f"{figure(value)} ms" for value in p50]
        lines.append([f"{name}, {case.title} in flight", *told])
    if not lines:
        return None
    head = ["", "MLServer", "Triton (Python)", "bare handler", "p50", "Triton's p50"]
    return markdown(head, lines)


def _p50(row: PeerRow | None, case: PeerCase) -> float | None:
    samples = row.cases.get(case, []) if row else []
    return median(sample.p50_ms for sample in samples) if samples else None


def machine(measured: Results) -> str:
    """The sentence about the machine and its use."""
    hardware, options = measured.hardware, measured.options
    server, client = hardware["server_core"], hardware["client_core"]
    same = " (the same core: not a fair run)" if server == client else ""
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['system']}, Python "
        f"{hardware['python']}; every server on core {server}, the clients on core {client}{same}; "
        f"load average before {hardware['load_average'][0]:.1f}; {options['date']}."
    )

"""Run the sweep, and write its page.

    python -m tests.sweep [--draw COUNT [--seed N]] [--shard I/N] [--results FILE] [--page FILE]
                          [PATTERN …]

With ``--draw`` the architectures are not the sweep's own: a seed draws them from other packages.
A run goes on where an earlier one with the same results file ended. Exits with 1 if an artifact is
wrong or an export crashed.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import warnings
from pathlib import Path

from tests import verb
from tests.sweep import attempts, page
from tests.sweep.attempts import FORMATS, ExportVerdict
from tests.sweep.catalogue import SAMPLE, catalogue

MARKS = {
    ExportVerdict.PUBLISHED: ".",
    ExportVerdict.REFUSED: "-",
    ExportVerdict.WRONG: "WRONG",
    ExportVerdict.CRASHED: "CRASHED",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("--format", dest="formats", action="append", choices=FORMATS)
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="the I-th of N parts")
    parser.add_argument(
        "--sample", action="store_true", help="one of every kind, to one format each"
    )
    parser.add_argument("--draw", type=int, default=0, metavar="COUNT", help="from other packages")
    parser.add_argument("--seed", type=int, default=0, help="of --draw")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=Path("build/sweep.jsonl"))
    parser.add_argument("--again", action="store_true", help="run what has a result, too")
    parser.add_argument("--page", type=Path, help="write the table here")
    options = parser.parse_args()
    shard, of = (int(part) for part in options.shard.split("/"))
    every = catalogue()
    if options.draw:
        from tests.sweep.drawn import drawn  # needs packages that the sweep itself does not

        every = {row.name: row for row in drawn(options.seed, options.draw)}
    known = SAMPLE if options.sample else every
    chosen = [n for n in known if any(fnmatch.fnmatch(n, p) for p in options.patterns)]
    if not chosen:
        parser.error(f"no architecture matches {' '.join(options.patterns)}")
    formats = tuple(options.formats or FORMATS)
    wanted = {n: (SAMPLE[n],) if options.sample else formats for n in chosen}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = {} if options.again else attempts.read(options.results)
    left = {n: [f for f in wanted[n] if (n, f) not in done] for n in chosen[shard - 1 :: of]}
    exports = [(every[n], formats) for n, formats in left.items() if formats]
    every_format = [name for _, formats in exports for name in formats]
    import_libraries(
        converts=every_format.count("onnx") > 1,
        tensorflow=not {"savedmodel", "tflite"}.isdisjoint(every_format),
    )
    count = sum(len(formats) for _, formats in exports)
    print(f"{count} exports of {len(exports)} architectures, {options.jobs} at once", flush=True)
    bad = 0
    for outcome in attempts.run(exports, options.jobs):
        attempts.append(options.results, outcome)
        bad += outcome.verdict in (ExportVerdict.WRONG, ExportVerdict.CRASHED)
        print(
            f"{MARKS[outcome.verdict]:<8}{outcome.architecture:<44}{outcome.format:<12}"
            f"{outcome.seconds:6.1f} s  {outcome.detail}",
            flush=True,
        )
    results = attempts.read(options.results)
    print(page.summary(results.values()))
    if options.page is not None:
        written = page.drawn(results.values(), options.seed) if options.draw else None
        options.page.write_text(written or page.markdown(results.values()))
    return int(bad > 0)


def import_libraries(converts: bool = True, tensorflow: bool = True) -> None:
    """Import once, before any process is forked, what every export needs.

    Args:
        converts: whether several processes convert to ONNX.
        tensorflow: whether a process needs TensorFlow.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    import torch
    import transformers.generation
    import transformers.modeling_utils

    import modelport.cli
    import modelport.exporters.export_pipeline

    if tensorflow:
        import modelport.exporters.runtime.tensorflow_runtime  # noqa: F401
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not converts:
        return
    model = torch.nn.Linear(2, 2).eval()
    # A first conversion imports and registers much, which every process inherits.
    torch.onnx.export(model, (torch.ones(2, 2),), dynamo=True, verbose=False)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    verb.run(main)

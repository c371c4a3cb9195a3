"""Gateways of Triton's tests of sequences and ragged batches."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.peer_suites import triton_models
from tests.peer_suites.suite import Bench
from tests.peer_suites.triton_models import SERVER
from tests.peer_suites.triton_repositories import Build
from tests.peer_suites.triton_stages import ON_CPU, Stage

_BATCHER = "L0_sequence_batcher/sequence_batcher_test.py"
_DYNAMIC = "L0_dyna_sequence_batcher/dyna_sequence_batcher_test.py"
_PROMPT = (
    *("simple_sequence", "length1_sequence", "batch_size", "no_sequence_start"),
    *("no_sequence_start2", "no_sequence_end", "no_correlation_id"),
)
#: Of ``test.sh``'s five, by name: the largest batch and the instances; ``0`` does not batch.
_TRIALS = {"0": (0, 4), "1": (4, 1), "2": (2, 2), "4": (1, 4), "v": (4, 1)}
_BACKENDS = "onnx libtorch python"


def ragged(backend: str) -> Build:
    """The models of ``L0_batch_input/test.sh``."""

    def build(bench: Bench, root: Path) -> None:
        made = triton_models.generated(bench, "gen_qa_ragged_models", f"--{backend}")
        identity = triton_models.generated(bench, "gen_qa_identity_models", f"--{backend}")
        batch, item = f"{backend}_batch_input", f"{backend}_batch_item"
        io = f"{backend}_nobatch_zero_1_float32"
        counts = ("BATCH_ELEMENT_COUNT", "BATCH_ACCUMULATED_ELEMENT_COUNT")
        zero = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
        for source, name, new, edits in (
            (made, batch, "ragged_element_count_acc_zero", ()),
            (made, batch, "ragged_acc_shape", (counts, (zero, "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"))),
            (made, batch, "batch_item_flatten", (counts, (zero, "BATCH_ITEM_SHAPE_FLATTEN"))),
            (made, item, "batch_item", ()),
            (
                *(identity, io, "ragged_io"),
                (
                    ("__0", "0"),
                    ("^max_batch_size:.*", "max_batch_size: 4"),
                    ('name: "INPUT0"', 'name: "INPUT0"\nallow_ragged_batch: true'),
                ),
            ),
        ):
            shutil.copytree(source / name, root / new)
            triton_models.edit(root, new, (name, new), *edits)
        flatten = root / "batch_item_flatten" / "config.pbtxt"
        flatten.write_text(flatten.read_text().replace("-1", "-1, -1", 1))
        triton_models.edit(
            *(root, "ragged_io"),
            append='batch_output [{target_name: "OUTPUT0" kind: BATCH_SCATTER_WITH_INPUT_SHAPE '
            'source_input: "INPUT0" }] dynamic_batching { max_queue_delay_microseconds: 1000000 }',
        )

    return build


def sequences(trial: str, implicit: str = "") -> Build:
    """The models of one trial of ``L0_sequence_batcher/test.sh``.

    Args:
        implicit: whether the models have an implicit state; `zero` or `file` has its first value.
    """
    generator = "gen_qa_implicit_models" if implicit else "gen_qa_sequence_models"
    variable = ("--variable",) if trial == "v" else ()
    initial = (f"--initial-state={implicit}",) if implicit in ("zero", "file") else ()
    batch, instances = _TRIALS[trial]
    kinds = ("object", "int32", "bool") if implicit else ("int32", "bool")

    def build(bench: Bench, root: Path) -> None:
        nobatch = "" if batch else "nobatch_"
        for backend in ("onnx", "libtorch"):
            made = triton_models.generated(bench, generator, f"--{backend}", *variable, *initial)
            names = (f"{backend}_{nobatch}sequence_{kind}" for kind in kinds)
            text = ("object",) if backend == "libtorch" else ()
            triton_models.copy(made, root, *(n for n in names if not n.endswith(text or "~")))
        if not implicit:
            made = triton_models.generated(bench, generator, "--ensemble", *variable)
            for kind in ("onnx", "libtorch"):
                triton_models.copy(made, root, f"*_{kind}_{nobatch}sequence_int32")
            triton_models.copy(made, root, "nop_*")
            for folder in root.glob("nop_*"):
                (folder / "1").mkdir(exist_ok=True)
            _pythons(bench, root, nobatch)
        for folder in root.iterdir():
            if "sequence" in folder.name:
                _resized(root, folder.name, batch, instances)

    return build


def _resized(root: Path, name: str, batch: int, instances: int) -> None:
    edits = [("kind: KIND_(GPU|CPU)", f"kind: KIND_CPU\ncount: {instances}")]
    if batch:
        edits.append(("^max_batch_size:.*", f"max_batch_size: {batch}"))
    triton_models.edit(root, name, *edits)


def _pythons(bench: Bench, root: Path, nobatch: str) -> None:
    """Python models with the configurations of the ONNX ones."""
    code = bench.source(SERVER) / "qa" / "python_models" / "sequence_int32" / "model.py"
    for folder in sorted(root.glob(f"*onnx_{nobatch}sequence_*")):
        name = folder.name.replace("onnx", "python")
        (root / name / "1").mkdir(parents=True)
        text = (folder / "config.pbtxt").read_text()
        if folder.name.startswith("onnx"):
            text = re.sub(r"platform:.*", 'backend: "python"', text)
            shutil.copy(code, root / name / "1")
        (root / name / "config.pbtxt").write_text(text.replace("onnx", "python"))


def oldest(implicit: bool, delayed: bool) -> Build:
    """The models of ``L0_dyna_sequence_batcher/test.sh``.

    Args:
        delayed: for its tests that wait for full batches.
    """
    word = "implicit_" if implicit else ""

    def build(bench: Bench, root: Path) -> None:
        for backend in ("onnx",) if implicit else ("onnx", "libtorch"):
            generator = f"gen_qa_dyna_sequence_{word}models"
            triton_models.copy(triton_models.generated(bench, generator, f"--{backend}"), root, "*")
        for folder in root.iterdir():
            edits = [(r"kind: KIND_CPU", "kind: KIND_CPU\ncount: 1")]
            if delayed:
                edits += [
                    ("max_candidate_sequences:.*", "max_candidate_sequences:4"),
                    ("max_queue_delay_microseconds:.*", "max_queue_delay_microseconds:5000000"),
                ]
            triton_models.edit(root, folder.name, *edits)

    return build


def states(bench: Bench, root: Path) -> None:
    """The models of ``L0_implicit_state/test.sh`` without those of native code."""
    for backend, state in (("onnx", "OUTPUT_STATE"), ("libtorch", "OUTPUT_STATE__1")):
        made = triton_models.generated(bench, "gen_qa_implicit_models", f"--{backend}")
        name = f"{backend}_nobatch_sequence_int32"
        triton_models.copy(made, root, name)
        triton_models.edit(root, name, ("KIND_GPU", "KIND_CPU"))
        output = f'output [{{ name: "{state}" \n data_type: TYPE_INT32 \n dims: [ 1 ] }}]'
        triton_models.renamed(root, name, f"{name}_output", append=output)


def timeouts(bench: Bench, root: Path) -> None:
    source = bench.source(SERVER) / "qa" / "L0_sequence_batcher" / "request_timeout_models"
    triton_models.copy(source, root, "*")


def ordered(bench: Bench, root: Path) -> None:
    """Python models, decoupled and not, that keep the order of responses, or do not."""
    for mode, more in (
        ("decoupled", "\nmodel_transaction_policy { decoupled: true }"),
        ("nondecoupled", ""),
    ):
        code = bench.source(SERVER) / "qa" / "python_models"
        for word in ("no_preserve", "preserve"):
            triton_models.copy(code, root, "sequence_py")
            name = f"seqpy_{word}_ordering_{mode}"
            (root / "sequence_py").rename(root / name)
            triton_models.edit(root, name, append=more)


def correlated(datatype: str) -> Build:
    """A Python model that gets correlation ids of ``datatype``."""

    def build(bench: Bench, root: Path) -> None:
        triton_models.copy(bench.source(SERVER) / "qa" / "python_models", root, "add_sub")
        control = f"kind: CONTROL_SEQUENCE_CORRID data_type: {datatype}"
        triton_models.edit(
            *(root, "add_sub"),
            append='sequence_batching { control_input [{ name: "CORRID" '
            f"control [{{ {control} }}] }}] }}",
        )

    return build


def _environment(trial: str, implicit: str = "") -> dict[str, str]:
    batch, instances = _TRIALS[trial]
    return {
        "BACKENDS": "onnx libtorch" if implicit else _BACKENDS,
        "ENSEMBLES": "0" if implicit else "1",
        "NO_BATCHING": str(int(not batch)),
        "MODEL_INSTANCES": str(instances),
        "BATCHER_TYPE": "VARIABLE" if trial == "v" else "FIXED",
        "IMPLICIT_STATE": str(int(bool(implicit))),
        "INITIAL_STATE_FILE": str(int(implicit == "file")),
    }


def _prompt(trial: str, implicit: str = "") -> tuple[Stage, ...]:
    """Each test that wants no delay has a gateway of its own, as in ``test.sh``."""
    label = f"{'implicit, ' if implicit else ''}models{trial}"
    return tuple(
        Stage(
            *(_BATCHER, sequences(trial, implicit)),
            select=f"SequenceBatcherTest and test_{test} and not test_{test}2",
            label=label,
            environment=_environment(trial, implicit),
            changed=ON_CPU,
        )
        for test in _PROMPT
    )


def _dynamic(implicit: bool) -> tuple[Stage, ...]:
    environment = {
        "BACKENDS": "onnx" if implicit else "onnx libtorch",
        "IMPLICIT_STATE": str(int(implicit)),
    }
    label = "implicit" if implicit else ""
    return tuple(
        Stage(
            *(_DYNAMIC, oldest(implicit, delayed)),
            select=f"test_{test} and not test_{test}_",
            label=label,
            environment={**environment, "NO_BATCHING": str(int(not delayed))},
        )
        for delayed, tests in (
            (False, ("simple_sequence", "length1_sequence")),
            (
                True,
                (
                    *("multi_sequence_different_shape", "multi_sequence"),
                    *("multi_parallel_sequence", "backlog", "backlog_fill"),
                    *("backlog_fill_no_end", "backlog_sequence_timeout"),
                ),
            ),
        )
        for test in tests
    )


STAGES = (
    *(
        Stage("L0_batch_input/batch_input_test.py", ragged(backend), label=backend)
        for backend in ("onnx", "libtorch")
    ),
    *_prompt("1"),
    *_prompt("0"),
    *_prompt("v"),
    *_prompt("1", "any"),
    Stage(_BATCHER, timeouts, select="RequestTimeoutTest", environment=_environment("4")),
    Stage(_BATCHER, ordered, select="PreserveOrderingTest", environment=_environment("4")),
    *_dynamic(False),
    *_dynamic(True),
    Stage(
        *("L0_implicit_state/implicit_state.py", states),
        select="request_output",
        environment={"BACKENDS": "onnx libtorch"},
        changed=ON_CPU,
    ),
    *(
        Stage(
            *("L0_sequence_corrid_batcher/sequence_corrid_batcher_test.py", correlated(datatype)),
            select="corrid_data_type",
            label=datatype,
            environment={
                **_environment("4"),
                "TRITONSERVER_CORRID_DATA_TYPE": datatype,
            },
        )
        for datatype in (
            f"TYPE_{name}" for name in ("STRING", "UINT32", "INT32", "UINT64", "INT64")
        )
    ),
)

"""The fields of ``config.pbtxt`` that the gateway reads, for their reference page.

Each field of ``model_config.proto`` is here or in a table of ``gateway/repository/config_schema``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelport.gateway.repository.config_schema import step, value_message

#: Path → effect.
READ: Mapping[str, str] = {
    "name": "must be the name of the model's folder",
    "platform": "the format, and with it the backend and the file",
    "backend": "the backend that serves the model",
    "default_model_filename": "the file or folder of the artifact in a version's folder",
    "version_policy.latest.num_versions": "serves this many of the newest versions",
    "version_policy.all": "serves all versions",
    "version_policy.specific.versions": "serves these versions",
    "max_batch_size": "largest batch; 0: the model has no batch dimension",
    "input.name": "name of the input",
    "input.data_type": "datatype of the input",
    "input.dims": "shape without the batch dimension; -1 is any size",
    "input.format": "`FORMAT_NHWC` or `FORMAT_NCHW`: where an image's channels are",
    "input.reshape.shape": "shape that the model gets in place of `dims`",
    "input.optional": "the input may be missing in a request",
    "output.name": "name of the output",
    "output.data_type": "datatype of the output",
    "output.dims": "shape without the batch dimension; -1 is any size",
    "output.reshape.shape": "shape that the model returns in place of `dims`",
    "output.label_filename": "file with the class labels, one a line, beside `config.pbtxt`",
    "optimization.graph.level": "graph optimization of ONNX Runtime: -1, 0, 1 or 2",
    "optimization.execution_accelerators.gpu_execution_accelerator.name": (
        "`tensorrt` or `cuda`, of ONNX Runtime"
    ),
    "optimization.execution_accelerators.gpu_execution_accelerator.parameters{}": (
        "options of the accelerator"
    ),
    "optimization.execution_accelerators.cpu_execution_accelerator.name": (
        "`openvino`, of ONNX Runtime"
    ),
    "optimization.execution_accelerators.cpu_execution_accelerator.parameters{}": (
        "options of the accelerator"
    ),
    "dynamic_batching.preferred_batch_size": "batches that run without a further wait",
    "dynamic_batching.max_queue_delay_microseconds": "wait for more requests",
    "dynamic_batching.preserve_ordering": "responses in the order of the requests",
    "dynamic_batching.priority_levels": "number of priority levels; 1 is the highest",
    "dynamic_batching.default_priority_level": "level of a request without a `priority`",
    **{
        f"dynamic_batching.{policy}.{field}": effect + whose
        for policy, whose in (
            ("default_queue_policy", ""),
            ("priority_queue_policy{}", ", of one priority level"),
        )
        for field, effect in (
            ("timeout_action", "`REJECT` or `DELAY` a request that waits too long"),
            ("default_timeout_microseconds", "longest wait"),
            ("allow_timeout_override", "a request's `timeout` counts if it is shorter"),
            ("max_queue_size", "most requests that wait"),
        )
    },
    **{
        f"sequence_batching.{path}": effect
        for path, effect in (
            ("max_sequence_idle_microseconds", "a sequence without requests ends after this time"),
            (
                "iterative_sequence",
                "each request is a sequence; a Python model may get it again (`set_release_flags`)",
            ),
            ("direct.max_queue_delay_microseconds", "wait for requests of other slots"),
            (
                "direct.minimum_slot_utilization",
                "share of slots with a request; then none waits",
            ),
            ("oldest.max_candidate_sequences", "sequences of an instance at a time; others wait"),
            ("oldest.preferred_batch_size", "batches that run without a further wait"),
            ("oldest.max_queue_delay_microseconds", "wait for requests of other sequences"),
            ("oldest.preserve_ordering", "responses in the order of the requests"),
            ("control_input.name", "input of the model that gets the control"),
            ("control_input.control.kind", "what the control tells: START, END, READY or CORRID"),
            ("control_input.control.int32_false_true", "values of an INT32 control"),
            ("control_input.control.fp32_false_true", "values of an FP32 control"),
            ("control_input.control.bool_false_true", "values of a BOOL control"),
            ("control_input.control.data_type", "datatype of the correlation id"),
            ("state.input_name", "input of the model that gets the state"),
            ("state.output_name", "output of the model with the next state"),
            ("state.data_type", "datatype of the state"),
            ("state.dims", "shape without the batch dimension; -1 is any size, first 1"),
            ("state.initial_state.data_type", "that of the state"),
            ("state.initial_state.dims", "shape of the first value"),
            ("state.initial_state.zero_data", "zeros"),
            ("state.initial_state.data_file", "a file in the folder `initial_state`"),
            ("state.initial_state.name", "names the first value; must be set"),
        )
    },
    "input.allow_ragged_batch": (
        "joins the elements of requests of any shapes in one dimension; a Python model gets each "
        "request by itself"
    ),
    **{
        f"batch_{side}.{path}": effect
        for side, kind, target in (
            ("input", "value that the gateway makes for each batch", "input of the model"),
            (
                "output",
                "`BATCH_SCATTER_WITH_INPUT_SHAPE`: splits by the shapes of an input",
                "output",
            ),
        )
        for path, effect in (
            ("kind", kind),
            ("target_name", target),
            ("source_input", "input whose shapes count"),
        )
    },
    "batch_input.data_type": "`TYPE_INT32` or `TYPE_FP32`",
    "ensemble_scheduling.step.model_name": "model of the step",
    "ensemble_scheduling.step.model_version": "version of that model; -1: the default one",
    "ensemble_scheduling.step.input_map{}": "the ensemble's tensor for an input of the model",
    "ensemble_scheduling.step.output_map{}": "the ensemble's tensor for an output of the model",
    "ensemble_scheduling.max_inflight_requests": (
        "requests that a step may have at its model at a time; 0: any number"
    ),
    "instance_group.name": "names the group in errors",
    "instance_group.kind": "`KIND_CPU`, `KIND_GPU` or `KIND_AUTO`",
    "instance_group.count": "number of instances",
    "instance_group.gpus": "index of the GPU",
    **{
        f"instance_group.rate_limiter.{field}": f"{effect}, with `--rate-limit execution_count`"
        for field, effect in (
            ("resources.name", "resource that an execution takes"),
            ("resources.count", "number of it"),
            ("resources.global", "all devices have it together"),
            ("priority", "an instance of priority 2 runs half as often as one of 1, if both wait"),
        )
    },
    "parameters{}.string_value": "see [parameters](#parameters)",
    "model_warmup.name": "names the sample in errors",
    "model_warmup.batch_size": "number of equal elements in the sample's batch; 0: it does not run",
    "model_warmup.count": "runs on every instance",
    "model_warmup.inputs{}.data_type": "datatype of the input",
    "model_warmup.inputs{}.dims": "shape of the input, without the batch dimension",
    "model_warmup.inputs{}.zero_data": "zeros",
    "model_warmup.inputs{}.random_data": "random values in the declared range",
    "model_warmup.inputs{}.input_data_file": "a file in the folder `warmup`",
    "model_transaction_policy.decoupled": "any number of responses to a request",
    "response_cache.enable": "caches responses",
    "model_metrics.metric_control.metric_identifier.family": (
        "`nv_inference_first_response_histogram_ms`"
    ),
    "model_metrics.metric_control.histogram_options.buckets": "upper bounds, in milliseconds",
}


def leaves(descriptor: Any, prefix: str = "") -> Iterator[str]:
    """The path of every field of a message that has no fields itself."""
    for field in descriptor.fields:
        path, inner = prefix + step(field), value_message(field)
        if inner is None or not inner.fields:
            yield path
        else:
            yield from leaves(inner, f"{path}.")

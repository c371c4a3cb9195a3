"""The last step before publishing: the gateway loads the version and answers requests."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from modelport.exporters.errors import ParityError
from modelport.exporters.loaded_model import Source
from modelport.exporters.proof.parity_report import ParityReport
from modelport.exporters.publishing import text_answers
from modelport.exporters.requests import sample_requests
from modelport.exporters.requests.random_inputs import unpadded_sampler
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.tolerance import Tolerance
from modelport.gateway.errors import ModelportError, Unsupported
from modelport.gateway.repository import config
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.server import trial_request


def check(
    staged: Path, wanted: ModelConfig, source: Source, report: ParityReport, native: bool
) -> None:
    """Serve the version in ``staged``, and compare an answer with the model's.

    If the version takes texts, its answers to some are compared with the pipeline's, too.

    Args:
        wanted: the configuration that it is published with, without warm-up requests.
        native: it needs ``--allow-native-code`` or a signature to be served, or is signed.

    Raises:
        Unsupported: the gateway refuses the model or the request.
        ParityError: the gateway has another answer than the model.
    """
    signature = source.signature
    batched = signature.max_batch_size > 0
    (staged.parent / config.FILENAME).write_text(config.to_text(wanted))
    sample = unpadded_sampler(source.spec)
    (inputs,) = sample_requests.requests(signature, sample, 1, 1, report.seed)
    asked = sample_requests.on_the_wire(signature.inputs, inputs, batched)
    texts = text_answers.cases(source, report.seed)
    every = [asked, *(case.inputs for case in texts)]
    try:
        with quiet(), _threads_kept():
            found, *answers = trial_request.answers(
                staged.parent.parent, wanted.name, every, native
            )
    except ModelportError as error:
        reason = str(error).rpartition(" is at UNAVAILABLE state: ")[2]
        raise Unsupported(f"the gateway does not serve this artifact: {reason}") from error
    if report.bounds is not None or report.branched_samples or report.conditioning:
        return  # single answers may differ
    for case, outputs in zip(texts, answers, strict=True):
        text_answers.check(case, outputs)
    tolerance = Tolerance(report.atol, report.rtol)
    references = sample_requests.on_the_wire(signature.outputs, source.reference(inputs), batched)
    for name, answer in references.items():
        wrong = tolerance.outside(answer, found[name])
        if answer.dtype.kind == "f":
            wrong &= np.isfinite(answer)
        if wrong.any():
            raise ParityError(
                f"the gateway's output '{name}' differs from the checkpoint's, although the "
                "artifact's does not; please report this with the model"
            )


@contextlib.contextmanager
def _threads_kept() -> Iterator[None]:
    """Undo what the gateway does to the threads of this process."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else 0
    try:
        yield
    finally:
        if torch is not None:
            torch.set_num_threads(before)

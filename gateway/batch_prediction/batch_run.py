"""A run of a file of rows through a model, in requests to a server of it.

The rows of the answers are written in the order of the file, each once, whenever the run is
killed and started again.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modelport.client import Client
from modelport.client_models import ModelDescription, TensorDescription
from modelport.gateway.batch_prediction import input_files, output_files
from modelport.gateway.batch_prediction.input_files import InputFile, RowBlock
from modelport.gateway.batch_prediction.model_inputs import RequestMaker, RowsRequest, inputs_of
from modelport.gateway.batch_prediction.output_files import BlockAnswers, OutputFile
from modelport.gateway.errors import (
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unknown,
    Unsupported,
    UsageError,
    suggestion,
)
from modelport.gateway.runtime.progress import Show
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype

#: Rows of a request to a server that does not tell how many it takes.
UNKNOWN_BATCH_SIZE = 32
#: Rounds of requests in a block, and rows of one; more rows cost less each.
BLOCK_ROUNDS, LEAST_BLOCK_ROWS = 4, 64
#: The assumed size of a row of an output whose dimensions the model leaves open, or of texts.
OPEN_ROW_BYTES = 1 << 16
#: Waits before a request to a server that is not available is repeated.
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
#: The rows of a request, and its outputs or the reason of its failure.
_Answer = tuple[Sequence[int], Mapping[str, Array] | str]


class PredictedFile(NamedTuple):
    """A file of answers.

    Attributes:
        rows, failed: the numbers of its rows, and of those with an error.
        resumed: rows that an earlier run had written.
    """

    path: Path
    rows: int
    failed: int
    resumed: int


class ServedModel(NamedTuple):
    """A model of a server; its tensors are without the dimension of the batch.

    Attributes:
        batch_size: the largest; 0: it takes single rows, without a batch.
    """

    name: str
    version: str
    inputs: tuple[TensorDescription, ...]
    outputs: tuple[TensorDescription, ...]
    optional: frozenset[str]
    batch_size: int


def served_model(client: Client, name: str, version: str, outputs: Sequence[str]) -> ServedModel:
    """Ask a server about a model.

    Args:
        version: empty: the newest that is ready.
        outputs: names of the outputs wanted; none: all.

    Raises:
        NotFound: it has no such model.
        UsageError: the model has no such output.
    """
    try:
        described = client.metadata(name, version)
    except NotFound as error:
        hint = suggestion(name, {each.name for each in client.models()} - {name}, "; ")
        raise NotFound(f"{error}{hint}") from error
    if not version and all(each.isdigit() for each in described.versions):
        version = max(described.versions, key=int, default="")
    config: dict[str, Any] = {}
    with contextlib.suppress(NotFound, Unsupported, Internal):  # not every server has it
        config = client.config(name, version)
    size = _batch_size(described, config)
    for each in outputs:
        if each not in {output.name for output in described.outputs}:
            known = ", ".join(output.name for output in described.outputs)
            raise UsageError(f"--output-name {each}: the model's outputs are {known}")
    inputs, answers = (
        tuple(each._replace(shape=each.shape[1:] if size else each.shape) for each in side)
        for side in (described.inputs, described.outputs)
    )
    return ServedModel(
        name,
        version,
        inputs,
        tuple(each for each in answers if not outputs or each.name in outputs),
        frozenset(each["name"] for each in config.get("input", ()) if each.get("optional")),
        size,
    )


def _batch_size(described: ModelDescription, config: Mapping[str, Any]) -> int:
    if config:
        return int(config.get("max_batch_size", 0))
    tensors = (*described.inputs, *described.outputs)
    return UNKNOWN_BATCH_SIZE if all(each.shape[:1] == (-1,) for each in tensors) else 0


class BatchRun:
    """Sends the rows of a file, and writes the answers.

    Args:
        batch_size: rows of a request; None: as many as the model takes.
        concurrency: requests at a time.
    """

    def __init__(
        self, client: Client, model: ServedModel, batch_size: int | None, concurrency: int
    ) -> None:
        if batch_size is not None and batch_size > max(1, model.batch_size):
            raise UsageError(
                f"--batch-size {batch_size} is more than the model's max_batch_size, "
                f"{model.batch_size}; give at most {max(1, model.batch_size)}"
            )
        self._client, self._model = client, model
        self._batch_size = min(model.batch_size, batch_size or model.batch_size)
        self._concurrency = concurrency
        self._outputs = [each.name for each in model.outputs]
        row_bytes = sum(
            OPEN_ROW_BYTES
            if -1 in each.shape or each.datatype is Datatype.BYTES
            else NUMPY_DTYPES[each.datatype].itemsize * math.prod(each.shape)
            for each in model.outputs
        )
        #: Rows of a block: their answers do not fill the memory, and soon are on the disk.
        self._block_rows = input_files.rows_of(
            row_bytes,
            max(LEAST_BLOCK_ROWS, BLOCK_ROUNDS * max(1, self._batch_size) * concurrency),
        )

    def predict(
        self,
        rows: InputFile,
        output: Path,
        columns: Mapping[str, Sequence[str]],
        run: Mapping[str, Any],
        overwrite: bool,
        progress: Show,
    ) -> PredictedFile:
        """Write the answers to the rows of a file.

        Args:
            columns: by input; others have the input's name.
            run: what else the answers depend on.

        Raises:
            UsageError: the file does not fit the model, or the answers belong to another run.
            Unavailable: the server has gone, or the disk is full; the same call goes on.
        """
        model = self._model
        inputs = inputs_of(rows, model.inputs, model.optional, columns)
        maker = RequestMaker(rows, inputs, self._batch_size)
        wanted = [*dict.fromkeys(name for each in inputs for name in each.columns)]
        described = {
            "columns": {each.tensor.name: list(each.columns) for each in inputs},
            "outputs": self._outputs,
            "version": model.version,
            **run,
        }
        with output_files.opened(output, model.outputs, described, overwrite) as answers:
            resumed = answers.done
            blocks = rows.blocks(wanted, resumed, self._block_rows)
            self._send(blocks, maker, answers, rows.size, progress)
            answers.finish()
            return PredictedFile(output, answers.done, answers.failed, resumed)

    def _send(
        self,
        blocks: Iterator[RowBlock],
        maker: RequestMaker,
        output: OutputFile,
        size: int,
        progress: Show,
    ) -> None:
        waiting: deque[tuple[RowBlock, dict[int, str], list[Future[list[_Answer]]]]] = deque()

        def write() -> None:
            block, errors, futures = waiting.popleft()
            output.write(self._answers(block.rows, errors, [f.result() for f in futures]))
            failed = f", {output.failed} failed" if output.failed else ""
            progress(f"{output.done} rows{failed}", block.position, size)

        executor = ThreadPoolExecutor(self._concurrency, "predict")
        try:
            for block in blocks:
                requests, errors = maker.requests(block)
                waiting.append((block, errors, [executor.submit(self._asked, r) for r in requests]))
                # One block is read while the requests of another are answered.
                while len(waiting) > 1 and (
                    sum(len(f) for _, _, f in waiting) - len(waiting[0][2]) >= self._concurrency
                    or len(waiting) > self._concurrency
                ):
                    write()
            while waiting:
                write()
        except Unavailable as error:
            raise type(error)(
                f"{error}; {output.done} rows are written: run the same command to go on"
            ) from error
        finally:
            executor.shutdown(cancel_futures=True)

    def _asked(self, request: RowsRequest) -> list[_Answer]:
        """The answer to a request; if it fails, to its halves: only the rows at fault fail."""
        try:
            return [(request.rows, self._answer(request))]
        except (InvalidArgument, Internal, Unknown) as error:
            if len(request.rows) == 1:
                return [(request.rows, str(error))]
            return [each for half in request.halves() for each in self._asked(half)]

    def _answer(self, request: RowsRequest) -> Mapping[str, Array]:
        model, count = self._model, len(request.rows)
        inputs = request.inputs
        if not self._batch_size:
            inputs = {name: array[0] for name, array in inputs.items()}
        for seconds in (*RETRY_SECONDS, None):
            try:
                found = self._client.infer(
                    model.name, inputs, version=model.version, outputs=self._outputs
                )
                break
            except Unavailable:
                if seconds is None:
                    raise
                time.sleep(seconds)
        for each in model.outputs:
            array = found.get(each.name)
            if array is None:
                raise Internal(f"the server's answer has no output '{each.name}'")
            if not self._batch_size:
                array = found[each.name] = array[np.newaxis]
            if array.ndim != len(each.shape) + 1 or len(array) != count:
                raise Internal(
                    f"output '{each.name}' has the shape {list(array.shape)} for {count} rows"
                )
            if each.datatype is Datatype.BYTES:
                found[each.name] = _texts(each.name, array)
        return found

    def _answers(
        self, count: int, errors: dict[int, str], found: Sequence[list[_Answer]]
    ) -> BlockAnswers:
        """Put the answers of a block's requests in the order of its rows."""
        parts = [each for answers in found for each in answers]
        errors |= {rows[0]: said for rows, said in parts if isinstance(said, str)}
        given = [(rows, outputs) for rows, outputs in parts if not isinstance(outputs, str)]
        columns: dict[str, Array | Sequence[Array | None]] = {}
        for each in self._model.outputs:
            arrays = [outputs[each.name] for _, outputs in given]
            in_order = all(isinstance(rows, range) for rows, _ in given)
            if not errors and in_order and len({array.shape[1:] for array in arrays}) == 1:
                columns[each.name] = np.concatenate(arrays)
                continue
            rows_of: list[Array | None] = [None] * count
            for (rows, _), array in zip(given, arrays, strict=True):
                for row, value in zip(rows, array, strict=True):
                    rows_of[row] = np.asarray(value, array.dtype)
            columns[each.name] = rows_of
        return BlockAnswers(count, columns, errors)


def _texts(name: str, array: Array) -> Array:
    texts: Array = np.empty(array.shape, object)
    try:
        texts.reshape(-1)[:] = [each.decode() for each in array.flat]
    except UnicodeDecodeError as error:
        raise Internal(f"output '{name}' is not text in UTF-8") from error
    return texts

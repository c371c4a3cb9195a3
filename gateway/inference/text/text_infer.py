"""The text interface of a version: an ``Infer`` of texts around the one of its tensors.

It is a named signature, ``text``, so a cache and admission control stand before it, and a batcher
behind it: texts of several requests share a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modelport.gateway.errors import IntegrityError
from modelport.gateway.inference.text import text_request, tokenizing
from modelport.gateway.inference.text.question_answering import QuestionAnswering
from modelport.gateway.inference.text.tasks import (
    Classification,
    FillMask,
    Outputs,
    TaskMaker,
    TextEmbedding,
    TextPipeline,
)
from modelport.gateway.inference.text.text_request import MAX_TEXTS, TextRequest
from modelport.gateway.inference.text.token_classification import TokenClassification
from modelport.gateway.inference.text.tokenizing import TextTokenizer
from modelport.gateway.inference.validation import Validator
from modelport.gateway.repository import text_settings
from modelport.gateway.repository.text_settings import TextSettings, TextTask
from modelport.gateway.runtime import offload
from modelport.gateway.types import (
    NUMPY_DTYPES,
    Answer,
    Axis,
    Deadline,
    Infer,
    InferRequest,
    InferResponse,
    ModelSignature,
    Tensor,
    finished,
)

if TYPE_CHECKING:
    from tokenizers import Encoding

#: The name of the signature.
TEXT_SIGNATURE = "text"
#: Texts of fewer characters are tokenized on the event loop, in a tenth of a millisecond.
INLINE_CHARACTERS = 2048
#: Outputs of fewer values are reduced on the event loop, and fewer sequences are answered there.
INLINE_VALUES, INLINE_SEQUENCES = 16_384, 64
#: Parameters for the batcher.
_QUEUE = ("priority", "timeout")
#: The parameter of a response with the number of tokens.
TOKENS = "prompt_tokens"
_IDS, _MASK, _TYPES = "input_ids", "attention_mask", "token_type_ids"
_TASKS: Mapping[TextTask, TaskMaker] = {
    TextTask.CLASSIFICATION: Classification,
    TextTask.TOKENS: TokenClassification,
    TextTask.QUESTIONS: QuestionAnswering,
    TextTask.FILL_MASK: FillMask,
}


class TextInterface(NamedTuple):
    """The text interface of a version.

    Attributes:
        signature: its inputs and outputs.
        tensors: the model's own signature, whose sequences may be padded.
        names: of its inputs.
    """

    settings: TextSettings
    task: TextPipeline
    signature: ModelSignature
    tensors: ModelSignature
    names: frozenset[str]

    def takes(self, inputs: Sequence[Tensor]) -> bool:
        """Whether a request is for texts: it names one of the inputs."""
        return any(tensor.name in self.names for tensor in inputs)


def load(version: Path, signature: ModelSignature) -> TextInterface | None:
    """Load the text interface of the version in a folder; None if it has none.

    Raises:
        Unsupported: ``tokenizers`` is not installed.
        IntegrityError: a file is malformed, or does not fit the model.
    """
    found = text_settings.read(version)
    if found is None:
        return None
    settings, content = found
    tokenizer = TextTokenizer(content, settings)
    task = _task(tokenizer, settings, signature)
    _check(task, signature, settings)
    texts = ModelSignature(task.inputs, task.outputs, MAX_TEXTS, any_shape=True)
    names = frozenset(spec.name for spec in task.inputs)
    return TextInterface(settings, task, texts, _padded(signature, settings), names)


def _task(
    tokenizer: TextTokenizer, settings: TextSettings, signature: ModelSignature
) -> TextPipeline:
    if settings.task is not TextTask.EMBEDDING:
        return _TASKS[settings.task](tokenizer, settings)
    name = settings.pooled or "last_hidden_state"
    sizes = [spec.wire_dims[-1:] for spec in signature.outputs if spec.name == name]
    if not sizes or sizes[0] in ((), (-1,)):
        raise _misfit(f"an output '{name}' of a fixed size")
    return TextEmbedding(tokenizer, settings, sizes[0][0])


def _check(task: TextPipeline, signature: ModelSignature, settings: TextSettings) -> None:
    """Raise unless the model has the tensors that the task needs."""
    inputs = {spec.name: spec for spec in signature.inputs}
    known = {_IDS, _MASK, _TYPES}
    if _IDS not in inputs or not inputs.keys() <= known or not signature.max_batch_size:
        raise _misfit("batches of input_ids, attention_mask and token_type_ids alone")
    (length,) = inputs[_IDS].dims if len(inputs[_IDS].dims) == 1 else (0,)
    axis = signature.axes.get(str(length), Axis("", maximum=_fixed(length)))
    if axis.maximum is not None and settings.max_tokens > axis.maximum:
        raise _misfit(f"sequences of {settings.max_tokens} tokens")
    missing = set(task.reads) - {spec.name for spec in signature.outputs}
    if missing:
        raise _misfit(f"an output '{min(missing)}'")
    if settings.task in (TextTask.CLASSIFICATION, TextTask.TOKENS):
        (output,) = (spec for spec in signature.outputs if spec.name == task.reads[0])
        if output.wire_dims[-1] != len(settings.labels):
            raise _misfit(f"{len(settings.labels)} classes, as its labels")


def _misfit(needed: str) -> IntegrityError:
    return IntegrityError(
        f"{text_settings.FILENAME} does not fit the model, which needs {needed}; publish the "
        "version again"
    )


def _padded(signature: ModelSignature, settings: TextSettings) -> ModelSignature:
    """The signature whose sequences the batcher may pad, so that it joins different lengths."""
    names = {dim for spec in signature.inputs for dim in spec.dims if isinstance(dim, str)}
    open_outputs = any(-1 in spec.dims for spec in signature.outputs)
    masked = any(spec.name == _MASK for spec in signature.inputs)
    if settings.pad is None or settings.pad_left or open_outputs or not masked or len(names) != 1:
        return signature
    (name,) = names
    padding = ((_IDS, settings.pad), (_MASK, 0), (_TYPES, settings.pad_type))
    axis = signature.axes.get(name, Axis(name))
    return replace(signature, axes={**signature.axes, name: replace(axis, padding=padding)})


class TextInfer:
    """Answers texts by the ``Infer`` of a model's tensors."""

    def __init__(self, text: TextInterface, infer: Infer, name: str, number: int) -> None:
        self._settings, self._task, self._infer = text.settings, text.task, infer
        self._name, self._number = name, number
        signature = text.tensors
        self._inputs = signature.inputs
        self._validator = Validator(name, signature)
        self._rows = signature.max_batch_size
        (length,) = next(spec.dims for spec in signature.inputs if spec.name == _IDS)
        self._shortest, self._fixed = _bounds(length, signature)
        #: The outputs with a value for each token.
        self._by_token = {spec.name for spec in signature.outputs if spec.dims[:1] == (length,)}

    def __call__(self, request: InferRequest, deadline: Deadline) -> Answer:
        asked = text_request.read(request, self._task.options)
        if asked.size > INLINE_CHARACTERS:
            return self._tokenized(request, asked, deadline)
        return self._run(request, asked, self._task.encode(asked), deadline)

    async def _tokenized(
        self, request: InferRequest, asked: TextRequest, deadline: Deadline
    ) -> InferResponse:
        sequences = await offload.run(partial(self._task.encode, asked), deadline)
        return await finished(self._run(request, asked, sequences, deadline))

    def _run(
        self,
        request: InferRequest,
        asked: TextRequest,
        sequences: Sequence[Encoding],
        deadline: Deadline,
    ) -> Answer:
        if len(sequences) > 1:
            return self._batches(request, asked, sequences, deadline)
        answer = self._infer(self._tensors(request, sequences), deadline)
        if not isinstance(answer, InferResponse) or _is_large(answer):
            return self._reduced(request, asked, sequences, answer, deadline)
        return self._answer(request, asked, sequences, self._reduce(asked, sequences, answer))

    async def _reduced(
        self,
        request: InferRequest,
        asked: TextRequest,
        sequences: Sequence[Encoding],
        answer: Answer,
        deadline: Deadline,
    ) -> InferResponse:
        reduced = await self._reduce_later(asked, sequences, await finished(answer), deadline)
        return self._answer(request, asked, sequences, reduced)

    async def _batches(
        self,
        request: InferRequest,
        asked: TextRequest,
        sequences: Sequence[Encoding],
        deadline: Deadline,
    ) -> InferResponse:
        """Run batches of similar lengths, one after the other."""
        reduced: list[Any] = [None] * len(sequences)
        for indices in self._batch_indices(sequences):
            batch = [sequences[index] for index in indices]
            response = await finished(self._infer(self._tensors(request, batch), deadline))
            found = await self._reduce_later(asked, batch, response, deadline)
            for index, each in zip(indices, found, strict=True):
                reduced[index] = each
        work = partial(self._answer, request, asked, sequences, reduced)
        return await offload.run(work, deadline) if len(sequences) > INLINE_SEQUENCES else work()

    def _batch_indices(self, sequences: Sequence[Encoding]) -> list[list[int]]:
        lengths = list(map(len, sequences))
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        batches: list[list[int]] = []
        alike = self._settings.pad is None
        for index in order:
            last = batches[-1] if batches else []
            full = len(last) == self._rows or not last
            if full or (alike and lengths[last[0]] != lengths[index]):
                batches.append([index])
            else:
                last.append(index)
        return batches

    def _tensors(self, request: InferRequest, batch: Sequence[Encoding]) -> InferRequest:
        arrays = tokenizing.padded(batch, self._settings, self._width(batch))
        inputs = [
            Tensor(spec.name, spec.datatype, arrays[spec.name].astype(NUMPY_DTYPES[spec.datatype]))
            for spec in self._inputs
        ]
        found = InferRequest(
            request.model_name,
            inputs,
            self._task.reads,
            request.model_version,
            parameters={k: v for k, v in request.parameters.items() if k in _QUEUE},
            trace=request.trace,
            timing=request.timing,
            via=request.via,
            caller=request.caller,
            span=request.span,
        )
        self._validator.check(found)
        return found

    def _width(self, batch: Sequence[Encoding]) -> int:
        return self._fixed or max(self._shortest, *map(len, batch))

    async def _reduce_later(
        self,
        asked: TextRequest,
        batch: Sequence[Encoding],
        response: InferResponse,
        deadline: Deadline,
    ) -> list[Any]:
        work = partial(self._reduce, asked, batch, response)
        return await offload.run(work, deadline) if _is_large(response) else work()

    def _reduce(
        self, asked: TextRequest, batch: Sequence[Encoding], response: InferResponse
    ) -> list[Any]:
        longest, found = self._width(batch), []
        left = self._settings.pad_left
        for row, sequence in enumerate(batch):
            offload.checkpoint()
            size = len(sequence)
            span = slice(longest - size, longest) if left else slice(size)
            found.append(self._task.reduce(asked, sequence, self._row(response, row, span)))
        return found

    def _row(self, response: InferResponse, row: int, span: slice) -> Outputs:
        outputs = {}
        for tensor in response.outputs:
            data = tensor.data[row]
            outputs[tensor.name] = data[span] if tensor.name in self._by_token else data
        return outputs

    def _answer(
        self,
        request: InferRequest,
        asked: TextRequest,
        sequences: Sequence[Encoding],
        reduced: Sequence[Any],
    ) -> InferResponse:
        outputs = self._task.answer(asked, sequences, reduced)
        if request.outputs:
            by_name = {tensor.name: tensor for tensor in outputs}
            outputs = [by_name[name] for name in request.outputs if name in by_name]
        tokens = {TOKENS: sum(map(len, sequences))}
        return InferResponse(self._name, self._number, outputs, parameters=tokens)


def _bounds(length: int | str, signature: ModelSignature) -> tuple[int, int]:
    """The shortest sequence of a model, and the only one; 0 if there are several."""
    axis = signature.axes.get(str(length), Axis(""))
    return axis.minimum, _fixed(length) or 0


def _fixed(length: int | str) -> int | None:
    """A dimension's size; None if it is dynamic."""
    return length if isinstance(length, int) and length > 0 else None


def _is_large(response: InferResponse) -> bool:
    return sum(tensor.data.size for tensor in response.outputs) > INLINE_VALUES

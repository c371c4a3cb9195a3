"""A request for texts: its strings and options, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.text.tokenizing import MAX_TEXT_BYTES
from modelport.gateway.types import Datatype, InferRequest, Parameter, Tensor

#: Texts in a request; OpenAI's limit for embeddings.
MAX_TEXTS = 2048
#: Bytes of all texts of a request.
MAX_BYTES = 8 << 20
#: Parameters of requests to any model.
_GENERAL = frozenset(
    {
        *("priority", "timeout", "sequence_id", "sequence_start", "sequence_end"),
        *("binary_data_output", "classification"),
    }
)


@dataclass(frozen=True, slots=True)
class TextRequest:
    """The strings of a request by input, and its options.

    Attributes:
        shapes: of the inputs, by name.
        size: characters of all strings.
    """

    strings: Mapping[str, Sequence[str]]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    options: Mapping[str, Parameter] = field(default_factory=dict)
    size: int = 0

    def flag(self, name: str) -> bool | None:
        """An option that is true or false; None if it is not given."""
        value = self.options.get(name)
        if value is None or type(value) is bool:
            return value
        raise InvalidArgument(f"parameter '{name}' must be true or false")

    def count(self, name: str, default: int, most: int) -> int:
        """An option that is a number from 1 to ``most``."""
        value = self.options.get(name, default)
        if type(value) is not int or not 1 <= value <= most:
            raise InvalidArgument(f"parameter '{name}' must be an integer from 1 to {most}")
        return value

    def text(self, name: str, default: str, known: Sequence[str] = ()) -> str:
        """An option that is a string, one of ``known`` if they are given."""
        value = self.options.get(name, default)
        if type(value) is not str or (known and value not in known):
            expected = ", ".join(known) if known else "a string"
            raise InvalidArgument(f"parameter '{name}' must be {expected}")
        return value


def read(request: InferRequest, options: Sequence[str]) -> TextRequest:
    """Read a request whose inputs have been validated.

    Args:
        options: names of the parameters that the task has.

    Raises:
        InvalidArgument: a text is too long or no UTF-8, or there are too many.
    """
    strings: dict[str, Sequence[str]] = {}
    size = 0
    for tensor in request.inputs:
        strings[tensor.name] = found = _strings(tensor)
        size += sum(map(len, found))
    if size > MAX_BYTES:
        raise InvalidArgument(f"the texts have {size} characters, at most {MAX_BYTES} are taken")
    for name in request.parameters:
        if name not in options and name not in _GENERAL:
            raise InvalidArgument(
                f"there is no parameter '{name[:64]}' for this task; it has {', '.join(options)}"
            )
    shapes = {tensor.name: tensor.data.shape for tensor in request.inputs}
    return TextRequest(strings, shapes, request.parameters, size)


def _strings(tensor: Tensor) -> list[str]:
    assert tensor.datatype is Datatype.BYTES
    items = tensor.data.reshape(-1).tolist()
    if not 1 <= len(items) <= MAX_TEXTS:
        raise InvalidArgument(
            f"input '{tensor.name}' has {len(items)} texts, 1 to {MAX_TEXTS} are taken"
        )
    found = []
    for index, item in enumerate(items):
        if len(item) > MAX_TEXT_BYTES:
            raise InvalidArgument(
                f"text {index + 1} of input '{tensor.name}' has {len(item)} bytes, at most "
                f"{MAX_TEXT_BYTES} are taken; split it"
            )
        try:
            found.append(item.decode())
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                f"text {index + 1} of input '{tensor.name}' is not valid UTF-8"
            ) from error
    return found

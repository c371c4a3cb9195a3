"""Check of a TensorFlow Lite file before an interpreter opens it.

Built-in operators only compute, and so do the few custom operators of every interpreter. Any other
custom operator is foreign code: ``Flex`` operators give access to all of TensorFlow, if it is
loaded in the same process. The schema is LiteRT's ``schema.fbs``; only the necessary parts are read
here.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

from modelport.gateway.errors import IntegrityError

IDENTIFIER = b"TFL3"
MAX_OPERATOR_CODES = 10_000
#: Tensors and operators of all subgraphs.
MAX_PARTS = 1_000_000

#: ``BuiltinOperator``
_CUSTOM, _DELEGATE = 32, 51
#: Custom operators of LiteRT's own resolver, which only compute.
_KNOWN = frozenset(
    str.split(
        """
        AudioSpectrogram Convolution2DTransposeBias MaxPoolingWithArgmax2D MaxUnpooling2D Mfcc
        NumericVerify TFLite_Detection_PostProcess
        """
    )
)
_ASSIGN_VARIABLE, _CALL_ONCE = 144, 129
#: MULTINOMIAL, RANDOM_UNIFORM, RANDOM_STANDARD_NORMAL
_RANDOM = frozenset({149, 148, 146})
#: Fields of ``Model`` and of ``OperatorCode`` by number.
_OPERATOR_CODES, _SUBGRAPHS, _EXTERNAL = 1, 2, (8, 9)
_DEPRECATED_CODE, _CUSTOM_CODE, _CODE = 0, 1, 3
#: Fields of ``SubGraph``, ``Tensor``, ``Operator`` and ``CallOnceOptions``.
_TENSORS, _OPERATORS = 0, 3
_IS_VARIABLE = 5
_CODE_INDEX, _OPTIONS = 0, 4
_INITIALISER = 0


class TfliteState(NamedTuple):
    """The parts of a model whose values outlive a run.

    Attributes:
        tensors: variable tensors of the only subgraph, such as those of an LSTM. Only these can be
            reset.
        resources: resource variables that a run assigns, or variable tensors of other subgraphs.
        random: operators that draw random numbers.
    """

    tensors: bool
    resources: bool
    random: bool


def check(content: bytes, file: str) -> None:
    """Refuse a model that needs more than built-in operators, or other files.

    Raises:
        IntegrityError: naming the operator; or it is not a TensorFlow Lite file.
    """
    with _reading(file):
        if content[4:8] != IDENTIFIER:
            raise ValueError("it has no identifier TFL3")
        model = _Table(content, _offset(content, 0))
        if any(model.place(field) for field in _EXTERNAL):
            raise _refused(file, "stores weights in other files")
        for code in model.tables(_OPERATOR_CODES):
            number, name = _number(code), code.text(_CUSTOM_CODE)
            if number == _DELEGATE or (number == _CUSTOM and name not in _KNOWN):
                raise _refused(file, f"uses operator '{name}', which is not TensorFlow Lite's own")


def state(content: bytes, file: str) -> TfliteState:
    """Read the state that the model keeps from its operators and tensors.

    Raises:
        IntegrityError: it is not a TensorFlow Lite file.
    """
    with _reading(file):
        model = _Table(content, _offset(content, 0))
        numbers = [_number(code) for code in model.tables(_OPERATOR_CODES)]
        tensors, assigning, initialisers = False, set[int](), set[int]()
        left = MAX_PARTS
        subgraphs = model.tables(_SUBGRAPHS)
        for index, subgraph in enumerate(subgraphs):
            own = subgraph.tables(_TENSORS, left)
            operators = subgraph.tables(_OPERATORS, left)
            left = max(0, left - len(own) - len(operators))
            tensors |= any(tensor.integer(_IS_VARIABLE, "<b") for tensor in own)
            for operator in operators:
                number = numbers[operator.integer(_CODE_INDEX, "<I")]
                if number == _ASSIGN_VARIABLE:
                    assigning.add(index)
                elif number == _CALL_ONCE:  # it runs a subgraph that assigns the initial values
                    options = operator.table(_OPTIONS)
                    initialisers.add(options.integer(_INITIALISER, "<i") if options else 0)
        resources = bool(assigning - initialisers) or (tensors and len(subgraphs) > 1)
        return TfliteState(tensors, resources, not _RANDOM.isdisjoint(numbers))


@contextlib.contextmanager
def _reading(file: str) -> Iterator[None]:
    try:
        yield
    except (struct.error, ValueError, IndexError) as error:
        raise IntegrityError(
            f"'{file}' does not load: it is damaged or not a TensorFlow Lite file ({error}); "
            "export the model again"
        ) from error


def _number(code: _Table) -> int:
    """The ``BuiltinOperator``; small numbers may be in an older field."""
    return max(code.integer(_DEPRECATED_CODE, "<b"), code.integer(_CODE, "<i"))


def _refused(file: str, what: str) -> IntegrityError:
    return IntegrityError(
        f"'{file}' {what}: refused and not loaded; convert the model with built-in operators alone"
    )


def _offset(content: bytes, position: int) -> int:
    """The position to which the unsigned offset at ``position`` refers."""
    (distance,) = struct.unpack_from("<I", content, position)
    return position + int(distance)


class _Table:
    """A table of a flatbuffer."""

    def __init__(self, content: bytes, position: int) -> None:
        self._content, self._position = content, position
        (back,) = struct.unpack_from("<i", content, position)
        self._fields = position - back
        if self._fields < 0:
            raise ValueError("a table has no fields")
        (self._size,) = struct.unpack_from("<H", content, self._fields)

    def place(self, field: int) -> int:
        """The position of a field; 0: not set."""
        where = 4 + 2 * field
        if where + 2 > self._size:
            return 0
        (distance,) = struct.unpack_from("<H", self._content, self._fields + where)
        return self._position + int(distance) if distance else 0

    def integer(self, field: int, form: str) -> int:
        place = self.place(field)
        return int(struct.unpack_from(form, self._content, place)[0]) if place else 0

    def text(self, field: int) -> str:
        place = self.place(field)
        if not place:
            return ""
        begin = _offset(self._content, place)
        (length,) = struct.unpack_from("<I", self._content, begin)
        return self._content[begin + 4 : begin + 4 + length].decode(errors="backslashreplace")

    def table(self, field: int) -> _Table | None:
        place = self.place(field)
        return _Table(self._content, _offset(self._content, place)) if place else None

    def tables(self, field: int, most: int = MAX_OPERATOR_CODES) -> list[_Table]:
        place = self.place(field)
        if not place:
            return []
        begin = _offset(self._content, place)
        (length,) = struct.unpack_from("<I", self._content, begin)
        if length > most:
            raise ValueError(f"it lists more than {most:,} parts")
        places = range(begin + 4, begin + 4 + 4 * length, 4)
        return [_Table(self._content, _offset(self._content, place)) for place in places]

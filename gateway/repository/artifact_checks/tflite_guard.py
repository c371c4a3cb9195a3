"""Check of a TensorFlow Lite file before an interpreter opens it.

Built-in operators only compute, and so do the few custom operators of every interpreter. Any other
custom operator is foreign code: ``Flex`` operators give access to all of TensorFlow, if it is
loaded in the same process. The schema is LiteRT's ``schema.fbs``; only the necessary parts are read
here.
"""

from __future__ import annotations

import struct

from modelport.gateway.errors import IntegrityError

IDENTIFIER = b"TFL3"
MAX_OPERATOR_CODES = 10_000

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
#: Fields of ``Model`` and of ``OperatorCode`` by number.
_OPERATOR_CODES, _EXTERNAL = 1, (8, 9)
_DEPRECATED_CODE, _CUSTOM_CODE, _CODE = 0, 1, 3


def check(content: bytes, file: str) -> None:
    """Refuse a model that needs more than built-in operators, or other files.

    Raises:
        IntegrityError: naming the operator; or it is not a TensorFlow Lite file.
    """
    try:
        if content[4:8] != IDENTIFIER:
            raise ValueError("it has no identifier TFL3")
        model = _Table(content, _offset(content, 0))
        if any(model.place(field) for field in _EXTERNAL):
            raise _refused(file, "stores weights in other files")
        for code in model.tables(_OPERATOR_CODES):
            number = max(code.integer(_DEPRECATED_CODE, "<b"), code.integer(_CODE, "<i"))
            name = code.text(_CUSTOM_CODE)
            if number == _DELEGATE or (number == _CUSTOM and name not in _KNOWN):
                raise _refused(file, f"uses operator '{name}', which is not TensorFlow Lite's own")
    except (struct.error, ValueError) as error:
        raise IntegrityError(
            f"'{file}' does not load: it is damaged or not a TensorFlow Lite file ({error}); "
            "export the model again"
        ) from error


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

    def tables(self, field: int) -> list[_Table]:
        place = self.place(field)
        if not place:
            return []
        begin = _offset(self._content, place)
        (length,) = struct.unpack_from("<I", self._content, begin)
        if length > MAX_OPERATOR_CODES:
            raise ValueError("it lists more operators than exist")
        places = range(begin + 4, begin + 4 + 4 * length, 4)
        return [_Table(self._content, _offset(self._content, place)) for place in places]

"""Images and sounds in requests: detection, and decoding off the event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference import audio_decoding, image_decoding
from modelport.gateway.inference.image_decoding import Decoder
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.runtime import offload
from modelport.gateway.types import Array, Deadline, TensorSpec

Version = TypeVar("Version")
Decoded = TypeVar("Decoded")


def in_json(body: bytes) -> bool:
    """Whether JSON may hold an image or a sound, ``{"b64": ...}``; the key may contain escapes."""
    return b'"b64"' in body or b"\\u" in body


def decoders(served: ServedVersion) -> dict[str, Decoder]:
    """Make the decoders of the inputs that are images or sounds, by name.

    An invalid configuration is reported to clients that send those, and to no others.
    """
    found = {spec.name: _decoder(served, spec) for spec in served.signature.inputs}
    return {name: decoder for name, decoder in found.items() if decoder is not None}


def _decoder(served: ServedVersion, spec: TensorSpec) -> Decoder | None:
    try:
        parameters = {k: value.string_value for k, value in served.config.parameters.items()}
        return audio_decoding.from_parameters(parameters, spec) or image_decoding.decoder(
            served.config, spec
        )
    except InvalidArgument as error:
        message = f"model '{served.name}': {error}"

        def refuse(_: bytes) -> Array:
            raise InvalidArgument(message)

        return refuse


async def decode_for(
    find: Callable[[], Version],
    slow: Callable[[Version], bool],
    decode: Callable[[Version], Decoded],
    deadline: Deadline,
) -> Decoded:
    """Decode a request for the version that ``find`` returns.

    A ``slow`` request is decoded in a thread. If another version has become the requested one in
    the meantime, the request is decoded again.
    """
    while True:
        version = find()
        if not slow(version):
            return decode(version)
        decoded = await offload.run(partial(decode, version), deadline)
        if find() is version:
            return decoded

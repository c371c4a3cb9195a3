"""JPEG and PNG images as model input, preprocessed as the model's configuration declares.

An input of a float type or UINT8 with one or three channels may be an image. The ``parameters`` of
``config.pbtxt`` define the preprocessing. Each is optional; without any of them images are refused,
because guessed preprocessing would give wrong results:

    image.layout         CHW or HWC; default: the input's ``format``, or where the channels are
    image.size           "224", or height and width "224,256"; needed for dynamic ``dims``
    image.resize         "256": resize the shorter side to 256, then crop to ``image.size``;
                         "256,320": resize to this height and width, then crop. Default: resize the
                         whole image to the model's size, without keeping the aspect ratio.
    image.interpolation  nearest, bilinear (the default), bicubic, lanczos, box or hamming
    image.scale          factor for pixel values 0 to 255; default: 1/255, and 1 for UINT8
    image.mean           subtracted from the result: one number, or one per channel
    image.std            divisor of the result

Order and rounding are torchvision's (``Resize``, ``CenterCrop``, ``ToTensor``, ``Normalize`` of a
PIL image). As there, transparency is dropped and the EXIF orientation is not applied.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.extras import missing_extra, require_extra
from modelport.gateway.inference import image_cost
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, TensorSpec

if TYPE_CHECKING:
    from PIL.Image import Image

#: The formats accepted from clients; every further decoder adds attack surface.
FORMATS = ("JPEG", "PNG")
#: Width times height: about 100 MB decoded. The header states it, so checked before decoding.
MAX_PIXELS = 1 << 25
#: The limit if the model's size is dynamic: 48 MB as three floats a pixel.
MAX_OPEN_PIXELS = 1 << 22
#: The longest side of a resized image.
MAX_SIDE = 1 << 14
_DATATYPES = (Datatype.FP16, Datatype.FP32, Datatype.FP64, Datatype.UINT8)
_CHANNELS = (1, 3)
_LAYOUTS = {"FORMAT_NCHW": "CHW", "FORMAT_NHWC": "HWC"}
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")

#: Height and width.
Size = tuple[int, int]
Decoder = Callable[[bytes], Array]


def check_installed(config: ModelConfig) -> None:
    """Check that images can be decoded, for a model that declares their preprocessing.

    Raises:
        Unsupported: Pillow is not installed.
    """
    if any(key.startswith("image.") for key in config.parameters):
        require_extra("images")


def decoder(config: ModelConfig, spec: TensorSpec) -> Decoder | None:
    """A function from image bytes to the input ``spec``; None: the input is not an image.

    The array has exactly ``spec.dims``, without a batch dimension if the model batches. If it does
    not and its dims begin with a batch dimension of 1 or -1, the array begins with 1. Decoding
    takes milliseconds, mostly without the GIL, so call it in a thread.

    Raises:
        InvalidArgument: here, naming the invalid or missing parameter; from the decoder, naming
            the input whose bytes are not a valid image or whose image has too many pixels.
    """
    parameters = {
        key: value.string_value
        for key, value in config.parameters.items()
        if key.startswith("image.")
    }
    for tensor in config.input:
        layout = _LAYOUTS.get(type(tensor).Format.Name(tensor.format))
        if parameters and layout and tensor.name == spec.name:
            parameters.setdefault("image.layout", layout)
    return from_parameters(parameters, spec)


def from_parameters(
    parameters: Mapping[str, str], spec: TensorSpec, formats: tuple[str, ...] | None = FORMATS
) -> Decoder | None:
    """``decoder`` from a configuration's strings; ``formats`` None: all that Pillow reads."""
    dims = spec.wire_dims
    leading = len(dims) - 3
    if spec.datatype not in _DATATYPES or leading not in (0, 1) or any(d > 1 for d in dims[:-3]):
        return None
    layout = _layout(parameters.get("image.layout"), dims[-3:])
    if layout is None:
        return None
    if not parameters:
        raise InvalidArgument(
            f"input '{spec.name}' takes no images, because its config.pbtxt declares no "
            "preprocessing; add image.mean and image.std (or image.scale) to its parameters, as "
            "'modelport export --image-mean --image-std' does, or send the tensor"
        )
    channels, *sides = dims[-3:] if layout == "CHW" else (dims[-1], *dims[-3:-1])
    interpolation = parameters.get("image.interpolation", "bilinear").lower()
    if interpolation not in _INTERPOLATIONS:
        raise InvalidArgument(
            f"parameter 'image.interpolation' must be one of {', '.join(_INTERPOLATIONS)}"
        )
    size = _size(parameters, sides)
    resize = _sides(parameters, "image.resize")
    if resize is not None and any(a < b for a, b in zip(resize * 2, size, strict=False)):
        raise InvalidArgument(
            f"parameter 'image.resize' is smaller than the model's image, {size[0]} x {size[1]}"
        )
    prepare = _Prepare(
        name=spec.name,
        formats=formats,
        mode="L" if channels == 1 else "RGB",
        size=size,
        resize=resize,
        interpolation=interpolation,
        values=_values(parameters, spec.datatype, channels),
        channels_first=layout == "CHW",
    )
    if not leading:
        return prepare
    return lambda data: prepare(data)[np.newaxis]


@dataclass(frozen=True, slots=True)
class _Prepare:
    """Bytes → ``[C, H, W]`` or ``[H, W, C]``.

    Attributes:
        size: of the result; -1: as in the image.
        resize: the shorter side, or height and width, before the crop.
        values: ``[channels, 256]``, the result for each pixel value, with all arithmetic done.
    """

    name: str
    formats: tuple[str, ...] | None
    mode: str
    size: Size
    resize: tuple[int, ...] | None
    interpolation: str
    values: Array
    channels_first: bool

    def __call__(self, data: bytes) -> Array:
        pixels = np.asarray(self._picture(data))
        if pixels.ndim == 2:
            pixels = pixels[..., np.newaxis]
        height, width, channels = pixels.shape
        shape = (channels, height, width) if self.channels_first else pixels.shape
        result = np.empty(shape, self.values.dtype)
        for channel in range(channels):
            target = result[channel] if self.channels_first else result[..., channel]
            # Every index is in range; "clip" spares the buffer of "raise".
            np.take(self.values[channel], pixels[..., channel], out=target, mode="clip")
        return result

    def _picture(self, data: bytes) -> Image:
        pillow = _pillow()
        try:
            # Only images from clients are bounded; formats None is for the user's own files.
            wanted = 0 if -1 in self.size else math.prod(self.size)
            content = data if self.formats is None else image_cost.checked(data, wanted)
            with pillow.open(BytesIO(content), formats=self.formats) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    raise self._too_large(MAX_PIXELS)
                return self._resized(_in_eight_bits(opened).convert(self.mode))
        except InvalidArgument:
            raise
        except image_cost.TooCostly as error:
            raise InvalidArgument(
                f"input '{self.name}': the image has {error}, and would take too long to decode; "
                "send a smaller one, or one that is less compressed"
            ) from error
        except pillow.DecompressionBombError as error:
            raise self._too_large(MAX_PIXELS) from error
        except Exception as error:  # decoders raise anything on damaged data
            known = "an image" if self.formats is None else f"a {' or '.join(self.formats)} image"
            raise InvalidArgument(
                f"input '{self.name}': the data is not {known}, or is damaged"
            ) from error

    def _resized(self, picture: Image) -> Image:
        how = _pillow().Resampling[self.interpolation.upper()]
        height, width = (
            wanted if wanted > 0 else own
            for wanted, own in zip(self.size, (picture.height, picture.width), strict=True)
        )
        if -1 in self.size and height * width > MAX_OPEN_PIXELS:
            raise self._too_large(MAX_OPEN_PIXELS)
        if self.resize is None:
            return picture.resize((width, height), how)
        if len(self.resize) == 2:
            picture = picture.resize((self.resize[1], self.resize[0]), how)
        else:
            shorter, longer = sorted(picture.size)
            other = self.resize[0] * longer // shorter
            if other > MAX_SIDE:
                raise InvalidArgument(
                    f"input '{self.name}': an image of {picture.width} x {picture.height} is too "
                    "long; send one closer to a square"
                )
            sides = (self.resize[0], other)
            portrait = picture.width <= picture.height
            picture = picture.resize(sides if portrait else sides[::-1], how)
        left = round((picture.width - width) / 2.0)
        top = round((picture.height - height) / 2.0)
        return picture.crop((left, top, left + width, top + height))

    def _too_large(self, most: int) -> InvalidArgument:
        return InvalidArgument(
            f"input '{self.name}': the image has more than {most} pixels; send a smaller one"
        )


@functools.cache
def _pillow() -> Any:
    """``PIL.Image`` with our size limit.

    Pillow warns below twice the limit and raises above it; ``_Prepare`` raises below as well.

    Raises:
        Unsupported: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra(error) from error

    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    return Image


def _in_eight_bits(picture: Image) -> Image:
    """Convert 16-bit grey to 8 bits; Pillow's own conversion clips values above 255."""
    if not picture.mode.startswith("I"):
        return picture
    grey: Image = _pillow().fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    return grey


def _layout(declared: str | None, dims: Sequence[int]) -> str | None:
    """CHW or HWC; None: no dimension has one or three channels."""
    if declared is not None and declared.upper() not in ("CHW", "HWC"):
        raise InvalidArgument(f"parameter 'image.layout' must be CHW or HWC, not '{declared}'")
    for layout, place in (("CHW", 0), ("HWC", 2)):
        if dims[place] in _CHANNELS and (declared is None or declared.upper() == layout):
            return layout
    return None


def _size(parameters: Mapping[str, str], dims: Sequence[int]) -> Size:
    """Height and width of the model's input."""
    declared = _sides(parameters, "image.size")
    if declared is None:
        if "image.resize" in parameters and -1 in dims:
            raise InvalidArgument("parameter 'image.resize' needs 'image.size' with dynamic dims")
        return dims[0], dims[1]
    height, width = declared if len(declared) == 2 else declared * 2
    if any(dim not in (-1, side) for dim, side in zip(dims, (height, width), strict=True)):
        raise InvalidArgument(
            f"parameter 'image.size' is {height} x {width}, the model's dims {dims[0]} x {dims[1]}"
        )
    return height, width


def _sides(parameters: Mapping[str, str], key: str) -> tuple[int, ...] | None:
    if key not in parameters:
        return None
    parts = [part.strip() for part in parameters[key].split(",")]
    numbers = [int(part) if part.isdecimal() and len(part) < 9 else 0 for part in parts]
    if len(parts) > 2 or not all(0 < number <= MAX_SIDE for number in numbers):
        raise InvalidArgument(
            f"parameter '{key}' must be one or two numbers from 1 to {MAX_SIDE}, height first"
        )
    return tuple(numbers)


def _values(parameters: Mapping[str, str], datatype: Datatype, channels: int) -> Array:
    """``[channels, 256]`` in the model's datatype: the result for each pixel value."""
    whole = datatype is Datatype.UINT8
    scale = _numbers(parameters, "image.scale", 1)
    mean = _numbers(parameters, "image.mean", channels)
    std = _numbers(parameters, "image.std", channels)
    if std is not None and not (std > 0).all():
        raise InvalidArgument("parameter 'image.std' must be greater than 0")
    pixels: Array = np.arange(256, dtype=np.float32)[np.newaxis]
    with np.errstate(all="ignore"):
        if scale is not None:
            pixels = pixels * scale
        elif not whole:
            pixels = pixels / np.float32(255)
        if mean is not None:
            pixels = pixels - mean
        if std is not None:
            pixels = pixels / std
        if whole:
            pixels = np.clip(np.rint(pixels), 0, 255)
        values = pixels.astype(NUMPY_DTYPES[datatype])
    if not (np.isfinite(pixels).all() and np.isfinite(values).all()):
        raise InvalidArgument(f"parameters 'image.*' give pixel values beyond {datatype}")
    return np.ascontiguousarray(np.broadcast_to(values, (channels, 256)))


def _numbers(parameters: Mapping[str, str], key: str, most: int) -> Array | None:
    """Read one number, or one for each channel, as float32 ``[1 or channels, 1]``."""
    text = parameters.get(key)
    if not text:
        return None
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) not in (1, most) or not all(map(math.isfinite, found)):
        wanted = "one number" if most == 1 else f"one number, or {most}"
        raise InvalidArgument(f"parameter '{key}' must be {wanted}, not '{text}'")
    with np.errstate(over="ignore"):  # ``_values`` refuses infinity
        return np.array(found, np.float32)[:, np.newaxis]

"""Pictures as inputs: what torchvision computes, and nothing that a hostile picture can cost."""

from __future__ import annotations

import io
import random
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference import image_cost
from modelport.gateway.inference.image_decoding import MAX_PIXELS, decoder, from_parameters
from modelport.gateway.repository import config as configuration
from modelport.gateway.types import Array, Datatype, TensorSpec
from tests import processor

PLAIN = {"image.interpolation": "bilinear"}  # the default: something must be declared
IMAGENET = {"image.mean": "0.485,0.456,0.406", "image.std": "0.229,0.224,0.225"}


def spec(*dims: int | str, datatype: Datatype = Datatype.FP32) -> TensorSpec:
    return TensorSpec("image", datatype, dims)


def photo(width: int, height: int, form: str = "PNG", mode: str = "RGB", seed: int = 0) -> bytes:
    shape = (height, width, len(mode)) if len(mode) > 1 else (height, width)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels, mode).save(stream, form)
    return stream.getvalue()


def decode(data: bytes, parameters: dict[str, str], wanted: TensorSpec) -> Array:
    found = from_parameters(parameters or PLAIN, wanted)
    assert found is not None
    return found(data)


def as_torchvision_has_it(data: bytes, shorter: int, side: int) -> Array:
    """``Resize(shorter)``, ``CenterCrop(side)``, ``ToTensor()``, ``Normalize`` of a PIL image."""
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    width, height = picture.size
    short, long = sorted(picture.size)
    sides = (shorter, int(shorter * long / short))
    picture = picture.resize(sides if width <= height else sides[::-1], Image.Resampling.BILINEAR)
    left, top = round((picture.width - side) / 2.0), round((picture.height - side) / 2.0)
    pixels = np.asarray(picture.crop((left, top, left + side, top + side)), np.float32) / 255
    mean, std = (
        np.array([float(v) for v in IMAGENET[key].split(",")], np.float32)
        for key in ("image.mean", "image.std")
    )
    result: Array = ((pixels - mean) / std).transpose(2, 0, 1)
    return result


@pytest.mark.parametrize("size", [(60, 41), (41, 60), (50, 50), (300, 33)])
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_shorter_side_centre_crop_and_normalisation_are_torchvisions_bit_for_bit(
    size: tuple[int, int], form: str
) -> None:
    data = photo(*size, form)
    given = decode(data, {**IMAGENET, "image.resize": "40"}, spec(3, 32, 32))
    assert given.dtype == np.float32
    np.testing.assert_array_equal(given, as_torchvision_has_it(data, 40, 32))


def test_without_a_resize_the_whole_picture_is_the_model_s_size() -> None:
    data = photo(8, 6)
    picture = Image.open(io.BytesIO(data)).resize((4, 4), Image.Resampling.BICUBIC)
    given = decode(data, {"image.interpolation": "bicubic"}, spec(3, 4, 4))
    np.testing.assert_array_equal(given, np.asarray(picture, np.float32).transpose(2, 0, 1) / 255)


def test_layouts_are_the_same_pixels() -> None:
    data = photo(5, 7)
    first = decode(data, {**IMAGENET, "image.layout": "CHW"}, spec(3, 7, 5))
    last = decode(data, {**IMAGENET, "image.layout": "HWC"}, spec(7, 5, 3))
    np.testing.assert_array_equal(first.transpose(1, 2, 0), last)
    np.testing.assert_array_equal(decode(data, IMAGENET, spec(7, 5, 3)), last)


@pytest.mark.parametrize("datatype", [Datatype.FP16, Datatype.FP64, Datatype.UINT8])
def test_datatypes(datatype: Datatype) -> None:
    data = photo(3, 3)
    pixels = np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1)
    given = decode(data, {}, spec(3, 3, 3, datatype=datatype))
    expected = pixels if datatype is Datatype.UINT8 else (pixels.astype("f4") / 255)
    np.testing.assert_array_equal(given, expected.astype(given.dtype))
    assert given.dtype.itemsize == {"FP16": 2, "FP64": 8, "UINT8": 1}[datatype.value]


def test_scale_is_what_a_pixel_is_multiplied_by() -> None:
    white = io.BytesIO()
    Image.new("L", (1, 1), 255).save(white, "PNG")
    given = decode(white.getvalue(), {"image.scale": "2", "image.mean": "10"}, spec(1, 1, 1))
    assert given.item() == 500.0
    half = spec(1, 1, 1, datatype=Datatype.UINT8)
    assert decode(white.getvalue(), {"image.scale": "0.5"}, half).item() == 128
    assert decode(white.getvalue(), {"image.scale": "3"}, half).item() == 255


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "RGB"])
def test_every_kind_of_colour_becomes_what_the_model_wants(mode: str) -> None:
    data = photo(4, 4, mode=mode)
    picture = Image.open(io.BytesIO(data))
    for channels, kind in ((1, "L"), (3, "RGB")):
        expected = np.asarray(picture.convert(kind), np.float32).reshape(4, 4, channels) / 255
        given = decode(data, {}, spec(channels, 4, 4))
        np.testing.assert_array_equal(given, expected.transpose(2, 0, 1))


def test_sixteen_bits_of_grey_keep_their_range() -> None:
    stream = io.BytesIO()
    Image.fromarray((np.arange(4, dtype=np.uint16) * 0x5555).reshape(2, 2)).save(stream, "PNG")
    given = decode(stream.getvalue(), {}, spec(1, 2, 2, datatype=Datatype.UINT8))
    assert given.ravel().tolist() == [0, 0x55, 0xAA, 0xFF]


def test_open_dims_take_the_declared_size_or_the_picture_s() -> None:
    data = photo(9, 5)
    assert decode(data, {}, spec(3, -1, "width")).shape == (3, 5, 9)
    assert decode(data, {"image.size": "4"}, spec(3, -1, -1)).shape == (3, 4, 4)
    assert decode(data, {"image.size": "4, 6"}, spec(3, -1, -1)).shape == (3, 4, 6)
    resized = {"image.size": "4,6", "image.resize": "7"}
    assert decode(data, resized, spec("h", "w", 3)).shape == (4, 6, 3)


def test_a_model_that_does_not_batch_gets_its_leading_dimension() -> None:
    data = photo(4, 4)
    assert decode(data, {}, spec(1, 3, 4, 4)).shape == (1, 3, 4, 4)
    assert decode(data, {}, spec(-1, 4, 4, 3)).shape == (1, 4, 4, 3)


@pytest.mark.parametrize(
    "wanted",
    [
        spec(16),
        spec(4, 4),
        spec(2, 4, 4),
        spec(2, 3, 4, 4),
        spec(1, 1, 3, 4, 4),
        spec(3, 4, 4, datatype=Datatype.BYTES),
        spec(3, 4, 4, datatype=Datatype.INT64),
    ],
)
def test_other_inputs_are_no_image(wanted: TensorSpec) -> None:
    assert from_parameters({}, wanted) is None


def test_the_configuration_s_own_format_is_the_layout() -> None:
    text = """
        input { name: "image" data_type: TYPE_FP32 format: FORMAT_NHWC dims: [3, 5, 3] }
        parameters { key: "image.mean" value { string_value: "0.5" } }
    """
    config = configuration.parse(text)
    found = decoder(config, spec(3, 5, 3))
    assert found is not None
    data = photo(5, 3)
    expected = np.asarray(Image.open(io.BytesIO(data)), np.float32) / 255 - 0.5
    np.testing.assert_array_equal(found(data), expected)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"image.layout": "NCHW"}, "must be CHW or HWC"),
        ({"image.mean": "a"}, "'image.mean' must be one number, or 3, not 'a'"),
        ({"image.mean": "1,2"}, "one number, or 3"),
        ({"image.mean": "nan"}, "one number, or 3"),
        ({"image.std": "0"}, "greater than 0"),
        ({"image.scale": "1,2,3"}, "must be one number, not"),
        ({"image.scale": "1e39"}, "beyond FP32"),
        ({"image.size": "5"}, "'image.size' is 5 x 5, the model's dims 4 x 4"),
        ({"image.size": "-1"}, "one or two numbers"),
        ({"image.size": "99999999999"}, "one or two numbers"),
        ({"image.resize": "1,2,3"}, "one or two numbers"),
        ({"image.resize": "3"}, "smaller than the model's image"),
        ({"image.interpolation": "cubist"}, "must be one of nearest"),
    ],
)
def test_a_parameter_that_is_wrong_is_named(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match="image") as caught:
        from_parameters(parameters, spec(3, 4, 4))
    assert message in str(caught.value)


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is this large."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1 << 20))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("sides", [(1 << 13, (1 << 12) + 1), (30_000, 30_000), (1 << 30, 1 << 30)])
def test_a_pixel_bomb_is_refused_by_its_header(sides: tuple[int, int]) -> None:
    assert sides[0] * sides[1] > MAX_PIXELS
    data = bomb(*sides)
    started = time.process_time()
    with pytest.raises(InvalidArgument, match=r"input 'image': .*send a smaller one|not a JPEG"):
        decode(data, {}, spec(3, 4, 4))
    assert processor.seconds_since(started) < 1


def test_open_dims_take_no_picture_that_becomes_hundreds_of_megabytes() -> None:
    stream = io.BytesIO()
    Image.effect_noise((4096, 1025), 50).save(stream, "PNG")
    with pytest.raises(InvalidArgument, match="more than 4194304 pixels"):
        decode(stream.getvalue(), {}, spec(1, -1, -1))
    assert decode(stream.getvalue(), {}, spec(1, 4, 4)).shape == (1, 4, 4)


def test_a_picture_of_one_line_is_not_stretched_without_end() -> None:
    with pytest.raises(InvalidArgument, match="closer to a square"):
        decode(photo(2000, 1), {"image.resize": "32"}, spec(3, 32, 32))


GIF = b"GIF89a\x01\x00\x01\x00\x00\x00\x00,\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02D\x01\x00;"


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"",
        lambda: b"not an image",
        lambda: photo(64, 64)[:-2000],
        lambda: photo(64, 64, "JPEG")[:-2000],
        lambda: photo(64, 64, "JPEG")[:20],
        lambda: GIF,
        lambda: photo(4, 4, "BMP"),
        lambda: photo(4, 4, "TIFF"),
    ],
)
def test_the_error_for_invalid_image_data_names_the_input(make: Callable[[], bytes]) -> None:
    with pytest.raises(InvalidArgument, match="input 'image': the data is not a JPEG or PNG image"):
        decode(make(), {}, spec(3, 4, 4))


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_mutated_bytes_are_a_picture_or_an_invalid_argument(form: str) -> None:
    """A refusal of ours, or an array of the right shape: nothing else comes out."""
    chance = random.Random(0)
    whole, outcomes = photo(24, 24, form), {True: 0, False: 0}
    found: Any = from_parameters({"image.resize": "20"}, spec(3, 16, 16))
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        try:
            assert found(bytes(data)).shape == (3, 16, 16)
            outcomes[True] += 1
        except InvalidArgument:
            outcomes[False] += 1
    assert all(outcomes.values()), outcomes


# -- cost ------------------------------------------------------------------------------------------


def png(width: int, height: int, before: bytes = b"", idat_bytes: int = 1 << 30) -> bytes:
    """Grey zeros, with chunks ``before`` the pixels, which are cut into chunks of so many bytes."""
    content = zlib.compress(bytes((width + 1) * height), 9)
    parts = [content[at : at + idat_bytes] for at in range(0, len(content), idat_bytes)]
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    pixels = b"".join(chunk(b"IDAT", part) for part in parts)
    return b"\x89PNG\r\n\x1a\n" + head + before + pixels + chunk(b"IEND")


def progressive(side: int, more_scans: int) -> bytes:
    """Grey, with its last scan again and again."""
    stream = io.BytesIO()
    Image.new("L", (side, side), 90).save(stream, "JPEG", progressive=True)
    data = stream.getvalue()
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * more_scans + b"\xff\xd9"


def truncated_progressive(side: int) -> bytes:
    """Some 200 bytes: the head of a progressive image, and scans that end at once."""
    stream = io.BytesIO()
    Image.new("L", (side, side), 90).save(stream, "JPEG", progressive=True)
    parts = stream.getvalue().split(b"\xff\xda")
    return b"\xff\xda".join([parts[0], *(part[:9] for part in parts[1:])]) + b"\xff\xd9"


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("pixels", png(1, 1 << 25)),
        ("pixels", png(1 << 25, 1)),
        ("pixels", png(1, 1 << 22)),
        ("pixels", png(1 << 18, 1)),
        ("pixels", png(1024, 1024)),
        ("pixels", progressive(5760, 0)),
        ("scans", progressive(512, 500)),
        ("scans", truncated_progressive(400)),
        ("chunks", png(8, 8, before=chunk(b"tEXt") * 100_000)),
        ("chunks", png(8, 8, before=chunk(b"IDAT") * 100_000)),
        ("chunks", b"\xff\xd8" + b"\xff\xfe\x00\x02" * 100_000 + progressive(8, 0)[2:]),
        ("chunks", b"\xff\xd8" * 100_000 + progressive(8, 0)[2:]),
    ],
    ids=range(12),
)
def test_an_image_that_costs_too_much_to_decode_is_refused_unread(what: str, data: bytes) -> None:
    started = time.process_time()
    with pytest.raises(
        InvalidArgument, match=f"has (the cost of|more than) .*{what}.* in {len(data)} bytes"
    ):
        decode(data, {}, spec(3, 8, 8))
    assert processor.seconds_since(started) < 0.1  # one of them took hours


def test_compressed_text_in_a_picture_is_not_inflated() -> None:
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1_000_000), 9)) * 500
    assert image_cost.checked(png(8, 8, before=text), 64) == png(8, 8)


@pytest.mark.thorough
def test_ordinary_pictures_of_every_size_are_decoded() -> None:
    one_colour = io.BytesIO()
    Image.new("RGB", (5000, 5000), (200, 30, 30)).save(one_colour, "JPEG", quality=75)
    for data in (
        photo(700, 500, "JPEG"),
        photo(2500, 2000, "PNG"),
        progressive(700, 0),
        one_colour.getvalue(),
        png(2000, 2000, idat_bytes=2000),
        photo(300, 200, "PNG", "RGBA"),
    ):
        assert image_cost.checked(data, 256 * 256) == data
        assert decode(data, {}, spec(3, 256, 256)).shape == (3, 256, 256)


def test_markers_within_a_scan_or_a_segment_are_no_scans() -> None:
    """A photograph has thousands of FF 00 and restarts; EXIF holds a whole small JPEG."""
    stream = io.BytesIO()
    thumbnail = photo(30, 30, "JPEG") * 3
    pixels = np.random.default_rng(0).integers(0, 256, (600, 600, 3), np.uint8)
    exif = b"Exif\0\0" + thumbnail
    Image.fromarray(pixels).save(stream, "JPEG", exif=exif, restart_marker_blocks=1)
    data = stream.getvalue()
    assert data.count(b"\xff\xda") > 1
    assert image_cost._jpeg(data)[2] == 1

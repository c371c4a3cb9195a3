"""A model on pictures is published with what becomes of them, or refuses them; labels too."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from torch import Tensor, nn

from modelport.exporters.sources.huggingface import vit
from modelport.gateway.errors import IntegrityError, InvalidArgument
from modelport.gateway.inference import image_decoding
from modelport.gateway.repository import config

Invoke = Callable[..., Result]


class Means(nn.Module):
    """The mean of every channel, as three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, image: Tensor) -> Tensor:
        return image.mean(dim=(2, 3)) * self.scale


class Scores(nn.Module):
    """A model on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


@pytest.fixture
def export(invoke: Invoke, tmp_path: Path) -> Callable[..., Result]:
    def run(*arguments: str, factory: Any = Means) -> Result:
        torch.save(factory().state_dict(), tmp_path / "m.pt")
        shape = ("--input", "image:FP32[3,4,4]=0..1") if factory is Means else ()
        fixed = (*shape, "--format", "torchscript", "--name", "m")
        return invoke(tmp_path / "m.pt", *fixed, *arguments, model=f"{__name__}:{factory.__name__}")

    return run


def published(tmp_path: Path) -> Any:
    return config.parse((tmp_path / "repository" / "m" / "config.pbtxt").read_text())


def picture() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), (51, 102, 255), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def test_flags_say_what_becomes_of_pixels_and_what_classes_are_called(
    export: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "names.txt").write_text("red\ngreen\nblue\n")
    flags = ("--image-mean", "0,0.4,0.5", "--image-std", "0.5", "--image-interpolation", "nearest")
    done = export(*flags, "--labels", str(tmp_path / "names.txt"))
    assert done.exit_code == 0, done.stderr
    found = published(tmp_path)
    assert {key: value.string_value for key, value in found.parameters.items() if "image" in key}
    decode = image_decoding.decoder(found, config.signature(found).inputs[0])
    assert decode is not None
    np.testing.assert_allclose(decode(picture())[:, 0, 0], [0.4, 0, 1], atol=1e-6)
    assert found.output[0].label_filename == "labels.txt"
    labels = (tmp_path / "repository" / "m" / "labels.txt").read_text()
    assert labels.split() == ["red", "green", "blue"]
    version = tmp_path / "repository" / "m" / "1"
    parity = json.loads((version / "certificate.json").read_text())["parity"]
    assert parity["decision"]["kind"] == "argmax", "labels make it a classifier"


def test_without_a_word_about_pixels_pictures_are_refused_and_the_remedy_named(
    export: Callable[..., Result], tmp_path: Path
) -> None:
    assert export().exit_code == 0
    found = published(tmp_path)
    with pytest.raises(InvalidArgument, match=r"'image' takes no images.*image.mean and image.std"):
        image_decoding.decoder(found, config.signature(found).inputs[0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--image-mean", "a"), "--image-mean: parameter 'image.mean' must be one number, or 3"),
        (("--image-std", "0"), "'image.std' must be greater than 0"),
        (("--image-size", "8"), "'image.size' is 8 x 8, the model's dims 4 x 4"),
        (
            ("--image-layout", "HWC"),
            "--image-layout: no input is an image; the model takes 'image'",
        ),
        (("--labels", "absent.txt"), "'--labels': Path 'absent.txt' does not exist"),
        (("--labels", "two.txt"), "names 2 classes, output 'output' has 3; give one line for each"),
        (("--labels", "empty.txt"), "is empty or has an empty line; write one"),
    ],
)
def test_a_flag_that_does_not_fit_is_one_line(
    arguments: tuple[str, ...],
    said: str,
    export: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.txt").write_text("a\nb\n")
    (tmp_path / "empty.txt").write_text("a\n\nc\n")
    done = export(*arguments)
    assert done.exit_code == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert said in line


def test_a_model_without_an_image_takes_no_image_flags(export: Callable[..., Result]) -> None:
    done = export("--image-mean", "0.5", factory=Scores)
    assert done.exit_code == 2, done.stderr
    assert "--image-mean: no input is an image; the model takes 'x' FP32 [4]" in done.stderr


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"size": {"height": 224, "width": 224}}, {}),
        ({"size": 224, "resample": 3}, {"image.interpolation": "bicubic"}),
        (
            {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": 224},
            {"image.resize": "256", "image.size": "224"},
        ),
        (
            {
                "size": {"height": 256, "width": 320},
                "do_center_crop": True,
                "crop_size": {"height": 224, "width": 256},
            },
            {"image.resize": "256,320", "image.size": "224,256"},
        ),
        ({"do_resize": False, "size": None}, {}),
    ],
)
def test_a_preprocessor_says_how_pictures_get_their_size(
    processor: dict[str, Any], expected: dict[str, str]
) -> None:
    found = vit.image_parameters(processor, 3, Path("preprocessor_config.json"))
    plain = {"image.layout": "CHW", "image.mean": "0.5", "image.std": "0.5"}
    assert found == {**plain, **expected}


@pytest.mark.parametrize(
    "processor",
    [
        {"resample": 9},
        {"do_center_crop": True, "size": {"shortest_edge": 256}, "crop_size": {"height": 2}},
        {"do_center_crop": True, "size": {"shortest_edge": -1}, "crop_size": 2},
    ],
)
def test_a_damaged_preprocessor_is_named(processor: dict[str, Any]) -> None:
    with pytest.raises(
        IntegrityError, match=r"'preprocessor_config.json': (resample|size|crop_size) is"
    ):
        vit.image_parameters(processor, 3, Path("preprocessor_config.json"))

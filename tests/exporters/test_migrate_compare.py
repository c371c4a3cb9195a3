"""``modelport migrate torchserve --compare``: both servers' answers to recorded requests."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from torch import Tensor, nn

from modelport.exporters.migration.replay import Difference
from tests.archives import mar, migrate, refused, torchscript

#: From path, headers and body to status and body.
Answer = Callable[[str, Any, bytes], tuple[int, bytes]]


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """A server that answers every POST with what ``answer`` gives; its address."""

    class AnsweringHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, content = answer(self.path, self.headers, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), AnsweringHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class SeededPictureMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 6)

    def forward(self, picture: Tensor) -> Tensor:
        return self.layer(picture.mean(dim=(2, 3)))


@pytest.fixture(scope="module")
def model() -> bytes:
    return torchscript(SeededPictureMean())


@pytest.fixture
def archive(tmp_path: Path, model: bytes) -> Path:
    return mar(tmp_path / "m.mar", "m", {"model.pt": model}, handler="image_classifier")


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    folder = tmp_path / "requests"
    folder.mkdir()
    (folder / "a.json").write_text("[1, 2]")
    return folder


def compare(
    archive: Path, requests: Path, old: Answer, new: Answer, *more: str
) -> tuple[Result, list[dict[str, Any]]]:
    """Exit and comparisons of the report."""
    report = archive.parent / "report.json"
    with answering(old) as old_url, answering(new) as new_url:
        flags = ["--compare", old_url, "--gateway", new_url, "--requests", str(requests)]
        flags += ["--report", str(report), *more]
        result = migrate(archive, archive.parent / "repository", *flags)
    return result, json.loads(report.read_text())["archives"][0]["comparisons"]


def says(value: Any, status: int = 200) -> Answer:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return lambda *_: (status, body)


def test_answers_that_agree_end_with_0_and_tell_the_largest_difference(
    archive: Path, requests: Path
) -> None:
    (requests / "b.jpg").write_bytes(b"\xff\xd8\xff")
    seen: list[tuple[str, str, str | None, bytes]] = []

    def old(path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        seen.append((path, headers["Content-Type"], headers["Authorization"], body))
        return 200, b'{"a": [1.0, 2], "b": null}'

    new = says({"b": None, "a": [1.00005, 2]})
    result, found = compare(archive, requests, old, new, "--token", "secret")
    assert result.exit_code == 0, result.output
    assert [each["max_difference"] for each in found] == [pytest.approx(5e-5)] * 2
    assert "5.00e-05" in result.output
    assert seen == [
        ("/predictions/m", "application/json", "Bearer secret", b"[1, 2]"),
        ("/predictions/m", "image/jpeg", "Bearer secret", b"\xff\xd8\xff"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ({"a": 1.0}, {"a": 1.1}, "answer.a was 1 and is 1.1"),
        ([1, [2, 3]], [1, [2, 4]], "answer[1][1] was 3 and is 4"),
        ({"a": 1}, {"b": 1}, "an object with a"),
        ([1, 2], [1], "a list of 2"),
        ([True], [1], "answer[0] was True and is 1"),
        ("cat", "dog", "'cat'"),
        ([float("nan")], [1.0], "answer[0] was nan"),
        ([float("inf")], [-float("inf")], "answer[0] was inf"),
        ({"a": None}, {"a": 0}, "answer.a was None"),
        (b"bytes", b"other", "the bodies differ"),
    ],
)
def test_answers_that_differ_end_with_3(
    old: Any, new: Any, word: str, archive: Path, requests: Path
) -> None:
    result, (found,) = compare(archive, requests, says(old), says(new))
    assert result.exit_code == 3, result.output
    assert word in found["problem"]
    assert compare(archive, requests, says(old), says(old), "--name", "same")[0].exit_code == 0


def test_the_tolerance_decides(archive: Path, requests: Path) -> None:
    for tolerance, code in (("0.2", 0), ("0.05", 3)):
        name = f"m{code}"
        flags = ("--tolerance", tolerance, "--name", name)
        result, _ = compare(archive, requests, says([1.0]), says([1.1]), *flags)
        assert result.exit_code == code, result.output


def test_statuses_are_compared_and_errors_may_use_other_words(
    archive: Path, requests: Path
) -> None:
    result, _ = compare(archive, requests, says({"code": 400}, 400), says({"error": ""}, 400))
    assert result.exit_code == 0, result.output
    flags = ("--name", "other")
    result, (found,) = compare(archive, requests, says([1]), says({"message": "no"}, 503), *flags)
    assert result.exit_code == 3
    assert "status 200 and 503" in found["problem"]
    assert "no" in found["problem"]


def test_a_redirect_is_not_followed(archive: Path, requests: Path) -> None:
    result, (found,) = compare(archive, requests, says(b"", 302), says([1]))
    assert (result.exit_code, found["statuses"]) == (3, [302, 200])


def test_a_server_that_is_not_there_is_named(archive: Path, requests: Path, tmp_path: Path) -> None:
    with answering(says([1])) as gone:
        pass
    with answering(says([1])) as new:
        flags = ("--compare", gone, "--gateway", new, "--requests", str(requests))
        result = migrate(archive, tmp_path / "repository", *flags)
    assert result.exit_code == 3, result.output
    assert "the old server did not respond" in " ".join(result.output.split())


def test_each_model_of_a_store_gets_its_own_requests(
    tmp_path: Path, model: bytes, requests: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    for name in ("a", "b"):
        mar(store / f"{name}.mar", name, {"model.pt": model}, handler="image_classifier")
    (requests / "b").mkdir()
    (requests / "b" / "only.json").write_text("[3]")
    paths: list[tuple[str, bytes]] = []

    def old(path: str, _: Any, body: bytes) -> tuple[int, bytes]:
        paths.append((path, body))
        return 200, b"[1]"

    result, _ = compare(store, requests, old, says([1]))
    assert result.exit_code == 0, result.output
    assert paths == [("/predictions/a", b"[1, 2]"), ("/predictions/b", b"[3]")]


@pytest.mark.parametrize(
    "url", ["localhost:8080", "ftp://x", "http://", "http://x:port", "http://x/predictions"]
)
def test_an_address_of_another_form_is_refused(
    url: str, archive: Path, requests: Path, tmp_path: Path
) -> None:
    flags = ("--compare", url, "--requests", str(requests))
    refused(migrate(archive, tmp_path / "repository", *flags), 2, "--compare", "http://host:8080")
    assert not (tmp_path / "repository").exists()


def test_a_tolerance_that_is_no_number_would_find_nothing_and_is_refused(
    archive: Path, tmp_path: Path
) -> None:
    refused(migrate(archive, tmp_path / "repository", "--tolerance", "nan"), 2, "--tolerance")


@pytest.mark.parametrize("below", ["", "inside"])
def test_a_repository_that_is_a_file_is_refused(below: str, archive: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(migrate(archive, tmp_path / "file" / below), 2, "--model-repository")


def test_deep_answers_are_compared_without_recursion() -> None:
    deep: Any = 1.0
    for _ in range(5_000):
        deep = [deep]
    difference = Difference(0.0)
    difference.walk("answer", deep, deep)
    assert difference.largest == 0.0


@pytest.mark.thorough
def test_the_gateway_serves_the_new_entry_for_the_comparison_itself(
    archive: Path, requests: Path, tmp_path: Path
) -> None:
    """The old server's answer is what TorchServe's image_classifier computes."""
    (requests / "a.json").unlink()
    pixels = np.random.default_rng(0).integers(0, 256, (300, 280, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    (requests / "picture.png").write_bytes(buffer.getvalue())

    def old(_: str, __: Any, body: bytes) -> tuple[int, bytes]:
        picture = Image.open(io.BytesIO(body)).convert("RGB")
        picture = picture.resize((256, 256 * 300 // 280), Image.Resampling.BILINEAR)
        left, top = 16, round((picture.height - 224) / 2)
        picture = picture.crop((left, top, left + 224, top + 224))
        values = torch.from_numpy(np.asarray(picture) / np.float32(255)).permute(2, 0, 1)
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        values = (values - mean[:, None, None]) / std[:, None, None]
        chances = torch.softmax(SeededPictureMean()(values[None]), 1)[0]
        top5 = torch.topk(chances, 5)
        pairs = zip(top5.indices.tolist(), top5.values.tolist(), strict=True)
        return 200, json.dumps({str(index): value for index, value in pairs}).encode()

    with torch.inference_mode(), answering(_inference(old)) as url:
        flags = ("--compare", url, "--requests", str(requests))
        result = migrate(archive, tmp_path / "repository", *flags)
    assert result.exit_code == 0, result.output
    assert "equal" in result.output


def _inference(answer: Answer) -> Answer:
    def run(*arguments: Any) -> tuple[int, bytes]:
        with torch.inference_mode():
            return answer(*arguments)

    return run


@pytest.mark.thorough
def test_the_error_for_an_entry_that_does_not_load_gives_the_reason(
    tmp_path: Path, requests: Path, model: bytes
) -> None:
    archive = mar(tmp_path / "m.mar", "m", {"model.pt": model})
    wrong = ("--input", "picture:FP32[3,8,8]", "--output-tensor", "y:INT64[6]")
    with answering(says([1])) as url:
        flags = (*wrong, "--compare", url, "--requests", str(requests))
        result = migrate(archive, tmp_path / "repository", *flags)
    assert result.exit_code == 3, result.output
    assert "cannot be compared" in result.stderr
    assert "'y'" in result.stderr

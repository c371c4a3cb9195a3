"""``modelport.toml``: what it may say, and one clear line for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import routes_file
from modelport.gateway.repository.routes_file import (
    ModelRoute,
    OutlierDetection,
    UpstreamProtocol,
)

TOML = """
[models.fraud]
backend = "triton"
endpoints = ["10.0.0.5:8001", "[::1]:8001"]
protocol = "http"
timeout_seconds = 30
config = "fraud.pbtxt"

[models.vit]
backend = "torchserve"
endpoints = ["vit:7070"]
"""
YAML = """
models:
  fraud:
    backend: triton
    endpoints: ["10.0.0.5:8001", "[::1]:8001"]
    protocol: http
    timeout_seconds: 30
    config: fraud.pbtxt
  vit: {backend: torchserve, endpoints: ["vit:7070"]}
"""


def written(folder: Path, name: str, text: str) -> Path:
    (folder / "fraud.pbtxt").touch()
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(("name", "text"), [("r.toml", TOML), ("r.yaml", YAML), ("r.yml", YAML)])
def test_toml_and_yaml_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    assert routes_file.load(written(tmp_path, name, text)) == {
        "fraud": ModelRoute(
            "triton",
            ("10.0.0.5:8001", "[::1]:8001"),
            UpstreamProtocol.HTTP,
            timeout_seconds=30.0,
            config=tmp_path / "fraud.pbtxt",
        ),
        "vit": ModelRoute("torchserve", ("vit:7070",)),
    }


def test_outlier_detection_is_set_in_envoys_words(tmp_path: Path) -> None:
    text = OUTLIERS + "consecutive_5xx = 3\nlatency_factor = 0\nmax_ejection_time_seconds = 30\n"
    found = routes_file.load(written(tmp_path, "r.toml", text))["m"].outlier_detection
    assert found == OutlierDetection(
        consecutive_5xx=3, latency_factor=0.0, max_ejection_time_seconds=30.0
    )


@pytest.mark.parametrize("name", ["empty.toml", "empty.yaml"])
def test_an_empty_file_routes_nothing(tmp_path: Path, name: str) -> None:
    assert routes_file.load(written(tmp_path, name, "")) == {}


OUTLIERS = '[models.m]\nbackend = "triton"\nendpoints = ["h:1"]\n[models.m.outlier_detection]\n'
GOOD = '[models.m]\nbackend = "triton"\nendpoints = ["h:1"]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "r.toml 'x' is unknown; use models"),
        ("models = 1", "r.toml 'models' must be a table, not 1"),
        ("[models]\nm = 1", "[models.m] must be a table"),
        ("[models.m]", "[models.m] needs 'backend', one of triton, tfserving, torchserve"),
        ('[models.m]\nbackend = "onnx"', "'backend' must be one of triton, tfserving, torchserve"),
        ('[models.m]\nbackend = "triton"', "[models.m] needs 'endpoints'"),
        ('[models.m]\nbackend = "triton"\nendpoints = []', "[models.m] needs 'endpoints'"),
        ('[models.m]\nbackend = "triton"\nendpoints = "h:1"', "must be a list of strings"),
        ('[models.m]\nbackend = "triton"\nendpoints = ["h"]', "must be 'host:port'"),
        ('[models.m]\nbackend = "triton"\nendpoints = ["http://h:1"]', "must be 'host:port'"),
        ('[models.m]\nbackend = "triton"\nendpoints = ["h:70000"]', "must be 'host:port'"),
        ('[models.m]\nbackend = "triton"\nendpoints = ["h:1/x"]', "must be 'host:port'"),
        ('[models.m]\nbackend = "triton"\nendpoints = ["::1:1"]', "IPv6 address in brackets"),
        ('[models.m]\nbackend = "triton"\nendpoints = ["h:1", "h:1"]', "repeats an endpoint"),
        ('[models."../m"]\nbackend = "triton"', "a model's name is that of a folder"),
        (GOOD + "managed = true", "[models.m] 'managed' is of an earlier version"),
        ('[models.m]\nbackend = "triton"\nmanaged = true', "list their addresses in 'endpoints'"),
        (GOOD + "[servers.triton]\ncommand = []", "r.toml 'servers' is of an earlier version"),
        (GOOD + "timeout = 3", "[models.m] 'timeout' is unknown"),
        (GOOD + "timeout_seconds = 0", "must be a number of seconds above 0, not 0"),
        (GOOD + "timeout_seconds = inf", "must be a number of seconds above 0, not inf"),
        (GOOD + 'timeout_seconds = "3"', "'timeout_seconds' must be a number, not '3'"),
        (GOOD + "timeout_seconds = true", "'timeout_seconds' must be a number, not True"),
        (GOOD + 'protocol = "thrift"', "'protocol' must be one of grpc, http, not 'thrift'"),
        (GOOD + "version = 3", "'version' must be a string, not 3"),
        (GOOD + 'label = "stable"', "'label' is for 'backend' tfserving only"),
        (GOOD + 'management = "h:2"', "'management' is for 'backend' torchserve only"),
        (GOOD + "max_reply_bytes = 0", "'max_reply_bytes' must be above 0"),
        (GOOD + 'config = "none.pbtxt"', "'config' is not a file"),
        (OUTLIERS + "consecutive_4xx = 1", "[outlier_detection] 'consecutive_4xx' is unknown"),
        (OUTLIERS + "consecutive_5xx = -1", "'consecutive_5xx' must be from 0 to 2147483647"),
        (OUTLIERS + "consecutive_5xx = 1.5", "'consecutive_5xx' must be an integer, not 1.5"),
        (OUTLIERS + "max_ejection_percent = 101", "must be from 0 to 100, not 101"),
        (OUTLIERS + "base_ejection_time_seconds = 0", "must be a number of seconds above 0"),
        (OUTLIERS + "latency_factor = 1", "'latency_factor' must be above 1, or 0, not 1"),
        (OUTLIERS + "latency_factor = nan", "'latency_factor' must be above 1, or 0, not nan"),
        ("[models.m]\nbackend=1\nbackend=2", "does not parse"),
        ("[", "does not parse"),
    ],
)
def test_every_error_is_one_line_that_names_table_and_key(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        routes_file.load(written(tmp_path, "r.toml", text))
    assert said in str(caught.value)
    assert str(tmp_path / "r.toml") in str(caught.value)
    assert "\n" not in str(caught.value) or said == "does not parse"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: {m: {backend: triton}, m: {backend: triton}}", "'m' is repeated in line 1"),
        ("models: {1: {backend: triton}}", "1 must be a string; put it in quotes"),
        ("models: !!python/object/apply:os.system [ls]", "does not parse"),
        ("a: &a [*a]", "'a' is unknown"),
        ("- 1", "must be a table"),
        ("'", "does not parse"),
    ],
)
def test_yaml_is_read_safely_and_as_strictly(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        routes_file.load(written(tmp_path, "r.yaml", text))
    assert said in str(caught.value)


def test_a_file_that_is_missing_not_text_or_of_another_kind_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not exist"):
        routes_file.load(tmp_path / "r.toml")
    with pytest.raises(InvalidArgument, match=r"must end in \.toml, \.yaml or \.yml"):
        routes_file.load(written(tmp_path, "r.json", "{}"))
    (tmp_path / "b.toml").write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match="does not parse"):
        routes_file.load(tmp_path / "b.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InvalidArgument, match="cannot be read"):
        routes_file.load(tmp_path / "folder.toml")

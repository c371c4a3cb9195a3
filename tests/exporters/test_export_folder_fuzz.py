"""Damaged and hostile Hugging Face folders, at random: each is exported and proven, or refused in
one line; nothing in it is run, and none takes memory that its weights do not justify."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from modelport.exporters.cli.export import export
from tests.exporters.huggingface_folders import write

FAMILIES = ("bert", "llama", "vit", "t5", "gpt2", "clip-text")
#: Cases of each run.
FEW, MANY = 24, 300
#: Growth of the memory at its peak by one case, in KiB.
MOST_GROWTH = 1 << 20

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 7, 10**6, 10**12, 2**64, -(2**63), 1e308, float("nan"), float("inf")),
    *("", "x", "a" * 10_000, "\ud800", "../../etc/passwd", "https://example.com/x", "float16"),
    *([], {}, [1, 2], [[]], {"a": 1}, [None], {"0": "a"}, [10**9] * 3, "'\n\r\x00\x1b[31m"),
)
KEYS = (
    *("auto_map", "quantization_config", "tie_word_embeddings", "dtype", "attn_implementation"),
    *("rope_scaling", "rope_parameters", "hidden_act", "id2label", "num_labels", "is_decoder"),
    *("is_encoder_decoder", "model_type", "architectures", "pad_token_id", "layer_types"),
    *("sliding_window", "vocab_size", "max_position_embeddings", "num_hidden_layers", "backbone"),
    *("text_config", "vision_config", "chunk_size_feed_forward", "gradient_checkpointing"),
)
OTHERS = (
    *("tokenizer.json", "vocab.txt", "preprocessor_config.json", "adapter_config.json"),
    *("modules.json", "generation_config.json", "sentencepiece.bpe.model", "custom.py"),
)
CONTENTS = (b"", b"{}", b"[]", b"5", b'{"auto_map": {"A": "x.Y"}}', b"\xff\xfe", b'{"size": -5}')
CONTENTS += (b'[{"idx": 0, "name": "0", "path": "", "type": "os.system"}]', b"null")
TARGETS = ("/etc/passwd", "/dev/zero", "/proc/self/mem", "..", "/nonexistent")


class CodeInPickle:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def any_file(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.iterdir()))


def change_config(folder: Path, rng: random.Random) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for _ in range(rng.choice((1, 1, 2, 3))):
        inside = rng.choice([config, *(x for x in config.values() if isinstance(x, dict))])
        key = rng.choice([*inside, *KEYS] or ["x"])
        inside[key] = rng.choice(VALUES)
    path.write_text(json.dumps(config))


def truncate(folder: Path, rng: random.Random) -> None:
    path = any_file(folder, rng)
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def flip_bits(folder: Path, rng: random.Random) -> None:
    path = any_file(folder, rng)
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 8, 64))):
        content[rng.randrange(min(len(content), rng.choice((64, 4096))))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def put_code(folder: Path, rng: random.Random) -> None:
    (folder / "model.safetensors").unlink()
    code = CodeInPickle(folder.parent / "ran")
    name = rng.choice(("pytorch_model.bin", "model.safetensors"))
    if rng.random() < 0.5:
        torch.save({"a": code}, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(code, rng.randrange(5)))


def link_out(folder: Path, rng: random.Random) -> None:
    path = any_file(folder, rng)
    path.unlink()
    path.symlink_to(rng.choice((*TARGETS, str(path))))


def remove(folder: Path, rng: random.Random) -> None:
    any_file(folder, rng).unlink()


def put_folder(folder: Path, rng: random.Random) -> None:
    path = any_file(folder, rng)
    path.unlink()
    path.mkdir()


def list_shards(folder: Path, rng: random.Random) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    shard = rng.choice(("../x.safetensors", "model-1.safetensors", "/etc/passwd", None, 5))
    index = rng.choice(({"weight_map": {"a": shard}}, {"weight_map": 5}, [], {}))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change_header(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    name = rng.choice([key for key in header if key != "__metadata__"])
    key, values = rng.choice(
        (
            ("dtype", ("F64", "BF16", "I8", "F8_E4M3", "X", "", None, 5)),
            ("shape", ([], [-1], [2**40, 2**40], [0], None, "x", [1.5])),
            ("data_offsets", ([0, 0], [-1, 5], [5, 1], None, [0, 2**63], ["a", "b"], [0])),
        )
    )
    header[name][key] = rng.choice(values)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def add_file(folder: Path, rng: random.Random) -> None:
    (folder / rng.choice(OTHERS)).write_bytes(rng.choice(CONTENTS))


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    *([change_config] * 9),
    *(truncate, flip_bits, put_code, link_out, remove, put_folder, list_shards, change_header),
    add_file,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("written")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check(written: Path, place: Path, families: tuple[str, ...], cases: range) -> None:
    found = set()
    for case in cases:
        rng = random.Random(case)
        family, damage = rng.choice(families), rng.choice(DAMAGES)
        if not (written / family).exists():
            write(family, written)
        folder = Path(shutil.copytree(written / family, place / "folder"))
        damage(folder, rng)
        repository = place / "repository"
        words = [str(folder), "--format", "torchscript", "--repository", str(repository)]
        before = peak()
        done = CliRunner().invoke(export, [*words, "--samples", "4", "--max-batch-size", "2", "-q"])
        where = case, family, damage.__name__, done.stderr
        assert done.exit_code in (0, 2, 3, 4, 5), where
        if done.exit_code:
            assert done.stderr.count("\n") == 1, where
        assert bool(done.exit_code) is not repository.exists(), where
        assert not (place / "ran").exists(), where
        assert peak() - before < MOST_GROWTH, where
        found.add(done.exit_code)
        for each in (folder, repository):
            shutil.rmtree(each, ignore_errors=True)
    assert found >= {0, 5}


@pytest.mark.thorough
def test_a_damaged_folder_is_exported_or_refused_in_one_line(written: Path, tmp_path: Path) -> None:
    check(written, tmp_path, ("vit",), range(FEW))


@pytest.mark.thorough
def test_many_damaged_folders_are_exported_or_refused_in_one_line(
    written: Path, tmp_path: Path
) -> None:
    check(written, tmp_path, FAMILIES, range(MANY))

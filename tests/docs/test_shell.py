"""The reader of ``test_blocks`` finds what a reader of the pages would stumble over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import pages, shell
from tests.docs.pages import ROOT, CodeBlock

#: README's block as it was: the third command never returns.
OLD = """
modelport export net.pt --model nets:Net --name net --format onnx
modelport serve --model-repository model_repository
echo '{"features": [[5.1, 3.5, 1.4, 0.2]]}' | modelport infer net -
"""


def block(text: str, language: str = "bash", title: str = "") -> CodeBlock:
    return CodeBlock(ROOT / "README.md", 1, language, title, "", text)


def test_a_server_in_the_foreground_must_be_the_last_command() -> None:
    with pytest.raises(AssertionError, match=r"README\.md:1: what follows"):
        shell.serves(block(OLD))
    assert not shell.serves(block(OLD.replace("model_repository\n", "model_repository &\n")))
    assert shell.serves(block("mkdir m\nmodelport serve m   # a folder\n"))


def test_commands_that_cannot_run_are_not_mixed_with_those_that_can() -> None:
    with pytest.raises(AssertionError, match="split it"):
        shell.reason(block("pip install --constraint constraints.txt '.[load]'\nmodelport doctor"))
    assert shell.reason(block("docker run \\\n  x\nkubectl apply -f y"))
    for command in ("locust --headless -f x", "modelport export m", "pip install ./acme-models"):
        assert not shell.reason(block(command)), command


def test_blocks_share_a_folder_and_a_network_and_each_can_use_the_ones_before(
    tmp_path: Path,
) -> None:
    serving = "python -m http.server --bind 127.0.0.1 8000 2>&1 | sed -u s/Serving/started/ >&2"
    said = shell.paste(
        [
            block("value = 7\n", "python", "values.py"),
            block("import values\nopen('seven', 'w').write(str(values.value))\n", "python"),
            block("sleep 99 &\nkill %1\ntest $(cat seven) = 7   # in this folder\n"),
            block("{ " + serving + "; } &\nuntil curl localhost:8000/seven; do sleep 0.1; done\n"),
        ],
        tmp_path,
    )
    assert "\n7" in said  # and the line that the server logs, sooner or later


@pytest.mark.parametrize(
    "wrong",
    [
        block("true\nfalse\ntrue\n"),
        block("curl localhost:1\n"),
        block("false | cat\n"),
        block("import nothing_of_the_kind\n", "python"),
    ],
    ids=lambda one: one.text.splitlines()[0],
)
def test_a_block_that_fails_is_named(wrong: CodeBlock, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"README\.md:1: failed: "):
        shell.paste([wrong, block("echo not reached\n")], tmp_path)


@pytest.mark.thorough
def test_a_server_that_does_not_start_fails_its_block(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"README\.md:1: failed: [\s\S]*no-such-folder"):
        shell.paste([block("modelport serve no-such-folder\n")], tmp_path)


def test_blocks_of_a_page_are_found_in_order() -> None:
    found = list(pages.blocks(ROOT / "README.md"))
    assert [one.line for one in found] == sorted(one.line for one in found)
    assert len(found) > 8

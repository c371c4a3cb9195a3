"""The options, make verbs, error messages, fields and files that the documentation names exist."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from docs import config_fields, generate
from modelport.cli import modelport
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.extras import install_extra
from modelport.gateway.repository import config_schema, routes_file
from modelport.gateway.wire.proto import model_config_pb2
from tests.docs import pages
from tests.docs.pages import ROOT
from tests.test_style import BANNED_WORDS

#: Options of other programs that the pages name.
ELSEWHERE = frozenset(
    {
        *(
            "--strict",
            "--service-kind",
            "--shared-memory",
            "--constraint",
            "--check",
            "--input-data",
            "--cacert",
            "--rollouts",
            "--ssl",
        ),
        *("--model_config_file", "--help", "--host", "--headless", "--arrival-rate", "--mix"),
        "--generate-hashes",  # of uv
        # of make gpu-check and gpu-wheels
        *("--device", "--onnxruntime", "--onnxruntime-gpu", "--seconds"),
        *("--load-seconds", "--load-shape", "--block", "--readme", "--plots", "--models"),
    }
)
#: deploy/ is written in the options of docker, kubectl and helm, and has tests of its own.
FILES = [file for file in pages.FILES if "deploy" not in file.parts]


def options(command: click.Command, path: str) -> Iterator[tuple[str, click.Option]]:
    """The options of a command and of those below it, without names that are refused by now."""
    for each in command.params:
        if isinstance(each, click.Option) and not each.hidden:
            yield path, each
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from options(found, f"{path} {name}")


def test_the_help_of_every_option_is_a_sentence() -> None:
    texts = [
        (path, each.opts[0], each.help or "") for path, each in options(modelport, "modelport")
    ]
    assert len(texts) > 100
    assert [row for row in texts if not row[2].partition("  [")[0].endswith(".")] == []


def test_every_option_that_the_pages_name_exists() -> None:
    ours = [each for _, each in options(modelport, "modelport")]
    known = {flag for each in ours for flag in (*each.opts, *each.secondary_opts)} | ELSEWHERE
    for file in FILES:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]", pages.prose(file)))
        assert named <= known, f"{file.relative_to(ROOT)}: {sorted(named - known)}"


def test_every_make_verb_that_the_pages_name_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for file in pages.FILES:
        for verb in re.findall(r"`make ([a-z-]+)", pages.prose(file)):
            assert re.search(rf"^{verb}:", makefile, re.MULTILINE), f"{file.name}: make {verb}"


def test_every_error_that_troubleshooting_explains_is_one() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = re.findall(r"^### `(.+)`$", text, re.MULTILINE)
    assert len(headings) > 30
    said = [text for texts in source_strings().values() for text in texts]
    for heading in headings:
        wanted = re.compile(".*".join(map(re.escape, heading.split("…"))), re.DOTALL)
        assert any(wanted.search(text) for text in said), heading


def from_an_index(text: str) -> list[str]:
    """Installations of modelport from a package index, which has none."""
    return re.findall(r"(?:pip install [\"']?modelport\b|install modelport\[)(?!\S* @).*", text)


def test_nothing_says_to_install_modelport_from_a_package_index() -> None:
    """Messages are by ``errors.install_extra``; pages name the checkout."""
    told = {str(file): file.read_text(encoding="utf-8") for file in pages.FILES}
    told |= {file: "\n".join(texts) for file, texts in source_strings().items()}
    told |= {str(file): file.read_text() for file in (ROOT / "deploy").rglob("*.yml")}
    assert len(told) > 300
    assert {name: found for name, text in told.items() if (found := from_an_index(text))} == {}
    assert install_extra("load").startswith("pip install '.[load]'")


def test_an_installation_from_an_index_is_found() -> None:
    for text in (
        "pip install 'modelport[load]'",
        "`pip install modelport`",
        "install modelport[x]",
    ):
        assert from_an_index(text), text
    for text in ('pip install "modelport[load] @ $MODELPORT"', "pip install '.[load]'"):
        assert not from_an_index(text), text


@functools.cache
def source_strings() -> dict[str, list[str]]:
    return {str(file): list(generate.strings(file)) for file in source_files()}


def source_files() -> Iterator[Path]:
    for package in generate.PACKAGES:
        yield from generate.sources(package)
    yield from (ROOT / "modelport").glob("*.py")


def test_the_page_on_config_pbtxt_has_every_field_and_parameter_in_one_table() -> None:
    """The fields are those of Triton's schema, the parameters those that the code reads."""
    page = generate.config_pbtxt_page()
    fields = page.partition("## Parameters")[0]
    for leaf in config_fields.leaves(model_config_pb2.ModelConfig.DESCRIPTOR):
        parts = leaf.split(".")
        above = {".".join(parts[: end + 1]) for end in range(len(parts))}
        above |= {path.rstrip("{}") for path in above}
        assert sum(fields.count(f"| `{path}` |") for path in above) == 1, leaf
    for table in (config_schema.PARAMETERS, *config_schema.BACKEND_PARAMETERS.values()):
        for name in (*table.read, *table.without_effect, *table.refused):
            assert f"`{name}` |" in page, name


def dead_links(file: Path, text: str) -> list[str]:
    """The links to files that the repository does not have."""
    targets = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text)
    return [t for t in targets if "://" not in t and not (file.parent / t).exists()]


def test_links_of_every_page_lead_to_files_of_the_repository() -> None:
    files = [*pages.FILES, ROOT / "CHANGELOG.md", *(ROOT / "docs/reference").glob("*.md")]
    assert {f.name: dead for f in files if (dead := dead_links(f, f.read_text()))} == {}


def test_a_link_to_a_page_that_only_the_site_has_is_found() -> None:
    page = ROOT / "docs" / "access.md"
    assert dead_links(page, "[a](deployment.md#helm), [b](../deploy/README.md#helm)") == [
        "deployment.md"
    ]


def test_the_pages_made_from_the_code_are_as_old_as_the_code() -> None:
    for name, text in generate.made_pages().items():
        written = (ROOT / "docs" / name).read_text()
        assert written == f"{text}\n", f"{name} is old: run `python -m docs.generate`"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_the_pages_made_from_the_code_have_its_names() -> None:
    """`make docs`, which CI runs, builds the site with them; it fails on a broken link."""
    made = generate.made_pages()
    for page, text in (
        ("cli", "\n## modelport serve\n"),
        ("cli", "Seconds between retries of a load. \\[default: 1.0;"),
        ("http", "`POST /v2/models/{model}/infer`"),
        ("configuration", "MODELPORT_SERVE_HTTP_PORT"),
        ("errors", "a rollout of"),
    ):
        assert text in made[f"reference/{page}.md"], page
        assert "\\<" not in made[f"reference/{page}.md"], "Markdown shows this backslash"


def test_every_key_of_a_route_that_the_configuration_page_lists_is_read(tmp_path: Path) -> None:
    page = generate.made_pages()["reference/configuration.md"]
    table = page.partition("### `[models.<name>]`")[2].partition("###")[0]
    keys = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert len(keys) > 15
    file = tmp_path / "routes.toml"
    file.write_text('[models.m]\nbackend = "triton"\nnobody_reads_this = 1')
    with pytest.raises(InvalidArgument, match="'nobody_reads_this' is unknown") as refused:
        routes_file.load(file)
    known = str(refused.value).partition("; use ")[2].split(", ")
    assert sorted(keys) == sorted(known)


def test_the_pages_have_no_words_of_a_private_dialect() -> None:
    for file in pages.FILES:
        assert BANNED_WORDS.findall(pages.prose(file)) == [], file.relative_to(ROOT)


def test_code_in_tables_shows_no_backslash() -> None:
    """On the site, a pipe within code needs no escape, and would be shown with it."""
    texts = {str(file): file.read_text(encoding="utf-8") for file in pages.FILES}
    for name, text in (texts | generate.made_pages()).items():
        code = [part for line in text.splitlines() for part in generate.CODE.split(line)[1::2]]
        assert [part for part in code if re.search(r"\\[|_]", part)] == [], name


def test_every_path_below_a_folder_of_the_repository_that_the_pages_name_exists() -> None:
    folders = "deploy|docs|exporters|gateway|loadtests|modelport|tests"
    files = [*pages.FILES, *(ROOT / "tests").rglob("README.md"), ROOT / "SECURITY.md"]
    named = {
        (str(file.relative_to(ROOT)), path)
        for file in files
        for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 30
    assert [(file, path) for file, path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_file_and_folder_of_the_architecture_exists() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    tree = re.search(r"```text\n(modelport/.+?)```", text, re.DOTALL)
    assert tree
    top, count = ROOT, 0
    for line in tree[1].splitlines():
        words = re.findall(r"\w+(?:\.py|/)", line)
        if not line.startswith(" "):
            top = ROOT / words[0]
        for word in words:
            places = (ROOT / word, top / word, top / words[0] / word)
            assert any(place.exists() for place in places), f"{word} of {line!r} does not exist"
            count += 1
    assert count > 60
    named = set(re.findall(r"(\w+)/", tree[1]))
    folders = {
        folder.name
        for package in ("gateway", "exporters", "loadtests")
        for folder in (ROOT / package).rglob("*/")
        if any(folder.glob("*.*"))
    }
    assert folders - named == {"__pycache__"}


def test_every_module_of_the_three_ways_exists() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    ways = text[text.index("## A request") : text.index("## Folders")]
    count = 0
    for row in re.findall(r"^\| \d.*$", ways, re.MULTILINE):
        folder = ROOT
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", row):
            found = next(
                (each for each in (ROOT, folder, folder.parent) if (each / name).exists()), None
            )
            assert found is not None, f"{name} of {row!r} does not exist"
            folder = found / name if name.endswith("/") else (found / name).parent
            count += 1
    assert count > 40


def test_every_file_and_folder_that_the_table_of_changes_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| to change | open |")[2].partition("\n\n")[0]
    names = re.findall(r"`([\w/*]+(?:\.py|/))`", table)
    assert [name for name in names if not list(ROOT.glob(name))] == []
    assert len(names) > 15

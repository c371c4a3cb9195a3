"""Pages made from the code, and the MkDocs hook that adopts documents from outside ``docs/``.

    python -m docs.generate

writes the pages, which are part of the repository, so that links to them work without the site. A
test says when they are older than the code. The command-line reference comes from the click
commands, the HTTP reference from the OpenAPI document of a running gateway, the configuration
reference from the classes that hold it.
"""

from __future__ import annotations

import ast
import functools
import http.client
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs import config_fields
from modelport import cli
from modelport.gateway.repository import config_schema, routes_file

ROOT = Path(__file__).resolve().parents[1]
#: Document outside ``docs/`` → page of the site.
ADOPTED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/README.md": "deployment.md",
    "deploy/ray/README.md": "deployment-ray.md",
}
PACKAGES = ("gateway", "exporters", "loadtests")
#: Exceptions whose messages reach a user.
ERRORS = frozenset(
    {
        *("InvalidArgument", "NotFound", "AlreadyExists", "Unsupported", "Unavailable", "Internal"),
        *("IntegrityError", "UsageError", "ParityError", "BadParameter", "Missing", "BadSlo"),
    }
)
#: Folders whose errors nobody but a developer sees.
_NOT_RAISED = frozenset({"proto", "demo_models"})
CODE = re.compile(r"(`[^`]*`)")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_ATTRIBUTE = re.compile(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the adopted documents."""
    for source, page in ADOPTED.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=turned(text, source, page)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links to documents outside ``docs/`` to their pages."""
    path = page.file.src_uri
    return markdown if path in ADOPTED.values() else turned(markdown, f"docs/{path}", path)


@functools.cache
def made_pages() -> dict[str, str]:
    """The pages made from the code, by their paths in ``docs/``."""
    return {
        "reference/cli.md": cli_page(),
        "reference/http.md": http_page(openapi()),
        "reference/configuration.md": configuration_page(),
        "reference/config-pbtxt.md": config_pbtxt_page(),
        "reference/errors.md": errors_page(),
    }


def turned(text: str, source: str, page: str) -> str:
    """The text of a document of the repository, its links turned to the site's pages."""
    folder = PurePosixPath(source).parent

    def link(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        found = os.path.normpath(folder / path)
        if source.startswith("docs/") and found.startswith("docs/"):
            return match[0]
        place = ADOPTED.get(found) or (found[5:] if found.startswith("docs/") else None)
        if place is None:  # a file of the repository, without a page
            return text if text.startswith("`") else f"{text} (`{found}`)"
        relative = os.path.relpath(place, os.path.dirname(page) or ".")
        return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return _LINK.sub(link, text)


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(_escape(cell, '|') for cell in line)} |" for line in lines)


# Command line


def cli_page() -> str:
    settings = cli.modelport.context_settings
    context = click.Context(cli.modelport, info_name="modelport", **settings)
    parts = [
        "# Command line",
        "Generated from the commands' `--help`. Every option can also be set in the environment or "
        "in a file: see [configuration](configuration.md).",
        *_command(cli.modelport, context),
    ]
    return "\n\n".join(parts)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## {context.command_path}"
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{context.command_path} {usage}\n```"
    yield _description(command.help or "")
    options = [p for p in command.params if isinstance(p, click.Option)]
    # Click keeps a command's own one with the names of the first context that has asked.
    names = context.help_option_names
    options.append(
        click.Option(names, is_flag=True, expose_value=False, help="Show this message and exit.")
    )
    rows = ((_flags(option), _help(option, context), _variable(option)) for option in options)
    yield table(("option", "meaning", "environment"), rows)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            inner = click.Context(found, parent=context, info_name=name, **found.context_settings)
            yield from _command(found, inner)


def _description(text: str) -> str:
    r"""Paragraphs; those marked with ``\b`` keep their lines."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    kept = (p.removeprefix("\b\n") if p.startswith("\b") else None for p in paragraphs)
    pairs = zip(paragraphs, kept, strict=True)
    return "\n\n".join(_escape(p) if k is None else f"```text\n{k}\n```" for p, k in pairs)


def _escape(text: str, characters: str = ">[]*_") -> str:
    """Escape ``<`` and put a backslash before the ``characters``; within code it would be shown."""
    parts = CODE.split(text)
    special = re.compile(f"([{re.escape(characters)}])")
    parts[::2] = (special.sub(r"\\\1", part).replace("<", "&lt;") for part in parts[::2])
    return "".join(parts)


def _flags(option: click.Option) -> str:
    metavar = "" if option.is_flag else f" {option.make_metavar(click.Context(cli.modelport))}"
    flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    return flags + (f" `{metavar.strip()}`" if metavar else "")


def _help(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    return _escape(" ".join(record[1].split())) if record else _escape(option.help or "")


def _variable(option: click.Option) -> str:
    name = option.envvar
    return f"`{name}`" if isinstance(name, str) else ""


# HTTP


def openapi() -> dict[str, Any]:
    """The OpenAPI document of a gateway that serves an empty repository."""
    program = Path(sys.executable).with_name("modelport")
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "serve", folder, "--log-format", "json", *ports]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        try:
            entries = (json.loads(line) for line in server.stderr)
            port = next(e["http_port"] for e in entries if e["event"] == "listening")
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/openapi.json")
            document: dict[str, Any] = json.load(connection.getresponse())
            connection.close()
        finally:
            server.terminate()
            server.communicate(timeout=30)
    return document


def http_page(document: Mapping[str, Any]) -> str:
    by_tag: dict[str, list[tuple[str, ...]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for tag in operation.get("tags", ["other"]):
                text = operation.get("description") or operation.get("summary", "")
                row = (f"`{method.upper()} {path}`", _escape(" ".join(text.split())))
                by_tag.setdefault(tag, []).append(row)
    parts = [
        "# HTTP",
        "Generated from the gateway's OpenAPI document. A running gateway has the document at "
        "`/openapi.json`, with every body, and shows it at `/docs`.",
    ]
    for tag, rows in by_tag.items():
        parts += [f"## {tag}", table(("request", ""), iter(rows))]
    return "\n\n".join(parts)


# Configuration


def configuration_page() -> str:
    context = click.Context(cli.modelport, info_name="modelport")
    rows = (row for row in _variables(cli.modelport, context))
    parts = [
        "# Configuration",
        "## Where options come from",
        "An option is read from the command line, then from the environment, then from the file "
        "that `--config` or `MODELPORT_CONFIG` names. The first one wins. The file is TOML with a "
        "table for each command; a key is the option without its dashes:",
        '```toml title="modelport-options.toml"\n[serve]\nhttp-port = 9000\n'
        'model-repository = ["/models"]\n```',
        "In the environment, a repeatable option is separated by spaces; folders and files are "
        "separated by colons, as in `PATH`. In the file it is a list.",
        "## The routes file: `modelport.toml` { #routes }",
        "`modelport serve --routes FILE`, TOML or YAML. [Other servers](../serving/routes.md) "
        "explains it.",
        "### `[models.<name>]`",
        _fields(routes_file.ModelRoute),
        "### `[models.<name>.outlier_detection]`",
        _fields(routes_file.OutlierDetection),
        "## Environment variables { #environment }",
        table(("variable", "option"), rows),
    ]
    return "\n\n".join(parts)


def _fields(kind: Any) -> str:
    return table(("key", "default", ""), _rows(kind))


def _rows(kind: Any) -> Iterator[tuple[str, ...]]:
    """The keys that a NamedTuple holds, with defaults, by its docstring's ``Attributes``."""
    text = inspect.cleandoc(kind.__doc__).partition("Attributes:\n")[2]
    told = {name: " ".join(about.split()) for name, about in _ATTRIBUTE.findall(text)}
    assert list(told) == list(kind._fields), f"{kind.__name__}: Attributes and fields differ"
    for key, about in told.items():
        if isinstance(kind._field_defaults.get(key), routes_file.RouteCredentials):
            yield from _rows(routes_file.RouteCredentials)  # keys of the same table
        else:
            yield f"`{key}`", _default(kind, key), about[0].upper() + about[1:]


def _default(kind: Any, key: str) -> str:
    value = kind._field_defaults.get(key)
    if value is None or (value != 0 and not value) or isinstance(value, tuple | Mapping):
        return ""
    return f"`{json.dumps(value)}`"


def _variables(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    for option in command.params:
        if isinstance(option, click.Option) and isinstance(option.envvar, str):
            yield f"`{option.envvar}`", f"`{context.command_path} {option.opts[0]}`"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _variables(found, click.Context(found, parent=context, info_name=name))


# config.pbtxt

_CONFIG_INTRODUCTION = (
    "A model's `config.pbtxt` has Triton's schema (`model_config.proto`). Each of its fields is in "
    "one of the three tables below, which are generated from the code; `{}` stands for a key of a "
    "map. If the file is missing, it is derived from the artifact. See also "
    "[versions](../serving/versions.md), [backends](../serving/backends.md), "
    "[warm-up](../serving/backends.md#warm-up), [batching](../serving/batching.md), "
    "[response cache](../serving/caching.md) and [streaming](../serving/deadlines.md#streaming)."
)
_CONFIG_PARAMETERS = (
    "What Triton's schema has no field for are `parameters`. Triton ignores and keeps them. The "
    "log names a parameter that is in none of the tables, and the nearest name that is.\n\n"
    '```text title="model_repository/fraud/config.pbtxt, in part"\n'
    'parameters { key: "axis.sequence" value { string_value: "1..64" } }\n```'
)


def config_pbtxt_page() -> str:
    backends = config_schema.BACKEND_PARAMETERS.items()
    parts = [
        "# config.pbtxt",
        _CONFIG_INTRODUCTION,
        _paths("effect", config_fields.READ),
        "## Accepted without effect",
        "The version is served, and the log names these fields. A field stands for those in it.",
        _paths("reason", config_schema.WITHOUT_EFFECT),
        "## Refused",
        "The model does not load. A model on another server may have these fields.",
        _paths("remedy", config_schema.REFUSED),
        "## Parameters",
        _CONFIG_PARAMETERS,
        _paths("meaning", config_schema.PARAMETERS.read, "parameter"),
        "Each backend has the parameters of Triton's backend of the same name, and some more:",
        _of_backends("meaning", {name: each.read for name, each in backends}),
        "### Accepted without effect { #parameters-without-effect }",
        _of_backends("reason", {name: each.without_effect for name, each in backends}),
        "### Refused { #refused-parameters }",
        _of_backends("remedy", {name: each.refused for name, each in backends}),
        "[Signed versions](../packaging.md#sign) allow changes of how a model runs, but not of "
        "what it computes.",
    ]
    return "\n\n".join(parts)


def _paths(about: str, rows: Mapping[str, str], name: str = "field") -> str:
    return table((name, about), ((f"`{path}`", text) for path, text in rows.items()))


def _of_backends(about: str, backends: Mapping[str, Mapping[str, str]]) -> str:
    rows = (
        (f"`{backend}`", f"`{name}`", text)
        for backend, names in backends.items()
        for name, text in names.items()
    )
    return table(("backend", "parameter", about), rows)


# Errors


def errors_page() -> str:
    """Every message that the code raises, by package: what is wrong; the remedy."""
    parts = [
        "# Error messages",
        "Generated from the code: every error that it raises. `…` stands for names and numbers. "
        "[Troubleshooting](../troubleshooting.md) explains the frequent ones.",
    ]
    for package in PACKAGES:
        rows = sorted({message for file in sources(package) for message in messages(file)})
        parts += [f"## {package}", table(("error", "message"), iter(rows))]
    return "\n\n".join(parts)


def sources(package: str) -> Iterator[Path]:
    for file in sorted((ROOT / package).rglob("*.py")):
        if not _NOT_RAISED & set(file.parts):
            yield file


def messages(file: Path) -> Iterator[tuple[str, str]]:
    """The names and messages of the exceptions that ``file`` makes."""
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name | ast.Attribute)
            and node.args
        ):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            text = _text(node.args[0])
            if name in ERRORS and text and " " in text:
                yield f"`{name}`", _escape(" ".join(text.split()))


def strings(file: Path) -> Iterator[str]:
    """Every string of ``file``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.expr) and (text := _text(node)):
            yield text


def _text(node: ast.expr) -> str:
    """A string as it stands in the code, with … for what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    return ""


if __name__ == "__main__":
    for name, content in made_pages().items():
        (ROOT / "docs" / name).write_text(f"{content}\n")

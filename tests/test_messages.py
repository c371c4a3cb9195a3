"""Messages of errors: they name no library, number or address of one."""

from __future__ import annotations

import ast
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

import modelport as package
from modelport.gateway.errors import plain_reason
from modelport.gateway.upstream import connection_errors
from tests.commands import modelport
from tests.test_layers import modules
from tests.thorough import sampled

#: What libraries put into the texts of their errors.
LEAKS = re.compile(
    r"ssl:|<urlopen|\[Errno|Errno \d|aiohttp|urllib|HTTPConnection|<html|<!DOCTYPE|Traceback"
    r"|0x[0-9a-f]{6}|unexpected|ipv4:|Connect call|_ssl\.c|\{\"error|RemoteDisconnected"
    r"|BadStatusLine|polling is enabled",
    re.IGNORECASE,
)
PAGE = b"<!DOCTYPE html>\n<html><body>Not here</body></html>"
#: What servers that are none of the protocol send, and then close the connection.
ANSWERS = {
    "nothing": b"",
    "garbage": b"SSH-2.0-OpenSSH_9.2\r\n",
    "page": b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%b" % (len(PAGE), PAGE),
    "error page": b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: %d\r\n\r\n%b" % (len(PAGE), PAGE),
    "bare": b'HTTP/1.1 404 Not Found\r\ncontent-length: 22\r\n\r\n{"detail":"Not Found"}',
    "truncated": b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{",
}
COMMANDS = (
    ("models", "--url"),
    ("load", "x", "--url"),
    ("rollout", "status", "--url"),
)
#: It starts a process for its requests, which costs more than all others.
LOADTEST = ("loadtest", "--model", "x")


@contextmanager
def answering(content: bytes) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(content)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("kind", sampled(ANSWERS, "garbage", "error page"))
def test_a_server_of_another_kind_is_described_in_plain_words(kind: str) -> None:
    with answering(ANSWERS[kind]) as address:
        for command in COMMANDS if kind == "garbage" else (*COMMANDS, LOADTEST):
            done = modelport(*command, address)
            assert done.returncode in (1, 2), (command, done)
            assert not LEAKS.search(done.stderr), (command, done.stderr)
            assert done.stderr.count("\n") == 1
            assert "127.0.0.1" in done.stderr or "URL" in done.stderr, (command, done.stderr)


def test_a_port_without_grpc_is_described_in_plain_words() -> None:
    with answering(ANSWERS["page"]) as address:
        done = modelport("models", "-i", "grpc", "--url", address)
        assert address in done.stderr
        assert not LEAKS.search(done.stderr), done.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:80"])
def test_a_server_that_cannot_be_reached_is_described_in_plain_words(address: str) -> None:
    for command in COMMANDS if address == "127.0.0.1:1" else (*COMMANDS, LOADTEST):
        done = modelport(*command, address)
        assert not LEAKS.search(done.stderr), (command, done.stderr)
        assert address in done.stderr


async def test_the_pattern_finds_the_words_of_libraries() -> None:
    """The known-bad variant: the texts of the errors behind those messages."""
    with pytest.raises(urllib.error.URLError) as of_urllib:
        urllib.request.urlopen("http://127.0.0.1:1")
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError) as of_aiohttp:
            await session.get("http://127.0.0.1:1")
    with pytest.raises(FileNotFoundError) as of_python:
        Path("/nowhere").read_text()
    for error in (of_urllib.value, of_aiohttp.value, of_python.value):
        assert LEAKS.search(str(error)), str(error)
        assert not LEAKS.search(connection_errors.reason(error))
    assert plain_reason(of_python.value) == "No such file or directory"


#: Errors of the system and of clients, whose text is not for users.
FOREIGN = {"OSError", "ConnectionError", "ssl.SSLError", "PermissionError", "FileNotFoundError"} | {
    *("aiohttp.ClientError", "http.client.HTTPException", "urllib.error.URLError", "grpc.RpcError")
}


def quoted(source: str) -> list[int]:
    """The lines that put an error of ``FOREIGN`` into a text as it is."""
    found: list[int] = []
    if not any(name in source for name in FOREIGN):
        return found
    for handler in ast.walk(ast.parse(source)):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if not {ast.unparse(kind) for kind in kinds if kind is not None} & FOREIGN:
            continue
        for node in ast.walk(ast.Module(handler.body, [])):
            text = node.value if isinstance(node, ast.FormattedValue) else None
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("str", "repr"):
                text = node.args[0] if node.args else None
            if isinstance(text, ast.Name) and text.id == handler.name:
                found.append(node.lineno)
    return found


def test_no_message_quotes_an_error_of_the_system_or_of_a_client() -> None:
    paths = [
        path
        for name in ("gateway", "exporters", "loadtests")
        for each, path in modules(name).items()
        if not each.startswith(("modelport.loadtests.benchmarks", "modelport.loadtests.peers"))
    ]
    paths += Path(package.__file__).parent.glob("*.py")
    wrong = [f"{path}:{line}" for path in paths for line in quoted(path.read_text("utf-8"))]
    assert not wrong
    assert quoted(
        "try:\n x()\nexcept (OSError, ValueError) as e:\n raise E(f'no: {e}') from e"
    ) == [4]

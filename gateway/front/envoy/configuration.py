"""Envoy's whole configuration (its bootstrap), from the gateway's settings.

One listener has both addresses, for two would mean two event loops in Envoy's Python: what comes in
by which port is told apart by the application. Everything a front owes lives here, except that a
body may not stand still (``front.py``): Envoy's own idle timeout would end long inferences too.
"""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path
from typing import Any

from gateway.errors import Unavailable
from gateway.settings import Settings

MAX_HEAD_KIB = 64
MAX_HEADERS = 1000
HEAD_SECONDS = 10
#: nginx's default. A client that reuses a connection just as it is closed sees an error.
KEEP_ALIVE_SECONDS = 75
#: An answer that its client does not read for so long is given up.
FLUSH_SECONDS = 30
#: Between the first GOAWAY and the last: a round trip, so that no stream is lost.
GOAWAY_SECONDS = 0.5
MAX_CONNECTIONS = 16_384
#: Of the process' files; the connections may have the others.
RESERVED_FILES = 256
MAX_CONCURRENT_STREAMS = 1024
#: Of a body, how much Envoy holds ahead of the application, and of a reply ahead of its client.
BUFFER_BYTES = 1024 * 1024
#: A peer that is silent on HTTP/2 for the first is asked, and let go after the second.
PING_SECONDS, PING_TIMEOUT_SECONDS = 60, 20
#: The name of the listener and of the connection manager's statistics.
NAME = "modelport"
_TYPES = "type.googleapis.com/"
_MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"


def bootstrap(settings: Settings, admin: Path, module: Path, application: str) -> dict[str, Any]:
    """As Envoy reads it: JSON, field for field ``envoy.config.bootstrap.v3.Bootstrap``.

    ``admin`` is the path of the administration's Unix socket, ``module`` pyvoy's shared library,
    ``application`` the ASGI application, ``module:attribute``.

    Raises:
        Unavailable: an address is none.
    """
    return {
        "admin": {
            "address": {"pipe": {"path": str(admin), "mode": 0o600}},
            "ignore_global_conn_limit": True,
        },
        "application_log_config": {"log_format": {"json_format": _LOG_FORMAT}},
        # The one regular expression here is a little larger than Envoy takes unasked.
        "layered_runtime": {
            "layers": [
                {"name": NAME, "static_layer": {"re2.max_program_size.error_level": 200}},
            ]
        },
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": f"{_TYPES}envoy.extensions.resource_monitors."
                        "downstream_connections.v3.DownstreamConnectionsConfig",
                        "max_active_downstream_connections": _max_connections(),
                    },
                }
            ]
        },
        "static_resources": {"listeners": [_listener(settings, module, application)]},
    }


def text(bootstrap: dict[str, Any]) -> str:
    return json.dumps(bootstrap, indent=2)


_LOG_FORMAT = {
    "event": "%j",
    "logger": "envoy.%n",
    "level": "%l",
    "timestamp": "%Y-%m-%dT%H:%M:%S.%fZ",
}


def _listener(settings: Settings, module: Path, application: str) -> dict[str, Any]:
    # Envoy has it of all addresses of a listener, or of none.
    is_dual = settings.http_address == settings.grpc_address == "::"
    return {
        "name": NAME,
        "address": _address(settings.http_address, settings.http_port, is_dual),
        "additional_addresses": [
            {"address": _address(settings.grpc_address, settings.grpc_port, is_dual)},
        ],
        "enable_reuse_port": True,
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": {
                            "@type": _TYPES + _MANAGER,
                            **_limits(),
                            **_as_it_came(),
                            "stat_prefix": NAME,
                            "codec_type": "AUTO",
                            "local_reply_config": _LOCAL_REPLIES,
                            "http_filters": [_paths(), _python(module, application)],
                            "route_config": {"virtual_hosts": [{"name": NAME, "domains": ["*"]}]},
                        },
                    }
                ]
            }
        ],
    }


def _max_connections() -> int:
    """As many as there may be files, without those that are needed besides."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(files - RESERVED_FILES, files // 2))


def _address(address: str, port: int, is_dual: bool) -> dict[str, Any]:
    """Envoy takes no names. ``is_dual``: ``::`` is to be IPv4's every interface too."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        number = socket.getaddrinfo(address, port, family, socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise Unavailable(f"'{address}' is no address: {error.strerror}") from error
    dual = {"ipv4_compat": True} if is_dual else {}
    return {"socket_address": {"address": number, "port_value": port, **dual}}


def _limits() -> dict[str, Any]:
    return {
        "max_request_headers_kb": MAX_HEAD_KIB,
        "request_headers_timeout": _seconds(HEAD_SECONDS),
        # An inference may take long, and a stream may be silent: no limit here.
        "stream_idle_timeout": "0s",
        "stream_flush_timeout": _seconds(FLUSH_SECONDS),
        "drain_timeout": _seconds(GOAWAY_SECONDS),
        "common_http_protocol_options": {
            "idle_timeout": _seconds(KEEP_ALIVE_SECONDS),
            "max_headers_count": MAX_HEADERS,
            "headers_with_underscores_action": "ALLOW",
        },
        "http2_protocol_options": {
            "max_concurrent_streams": MAX_CONCURRENT_STREAMS,
            "initial_stream_window_size": BUFFER_BYTES,
            "initial_connection_window_size": 16 * BUFFER_BYTES,
            "connection_keepalive": {
                "interval": _seconds(PING_SECONDS),
                "timeout": _seconds(PING_TIMEOUT_SECONDS),
            },
        },
    }


def _as_it_came() -> dict[str, Any]:
    """The application judges the path as it came, and nothing is added to what it says."""
    return {
        "normalize_path": False,
        "merge_slashes": False,
        "path_with_escaped_slashes_action": "KEEP_UNCHANGED",
        "server_header_transformation": "PASS_THROUGH",
        "generate_request_id": False,
        **_TRUST,
        "http_protocol_options": {
            "accept_http_10": True,
            "default_host_for_http_10": NAME,
            # RFC 9110, 7.8: an offer to upgrade may be ignored; ``curl --http2`` makes one.
            "ignore_http_11_upgrade": [{"safe_regex": {"regex": ".*"}}],
        },
    }


#: Envoy takes ``x-envoy-expected-rq-timeout-ms`` away from whom it does not trust. Here it is an
#: HTTP client's way to state a timeout, so everybody is trusted with it; and as a stated
#: ``x-forwarded-for`` would be judged too, that header goes first.
_TRUST = {
    "use_remote_address": True,
    "skip_xff_append": True,
    "internal_address_config": {
        "cidr_ranges": [
            {"address_prefix": "0.0.0.0", "prefix_len": 0},
            {"address_prefix": "::", "prefix_len": 0},
        ]
    },
    "early_header_mutation_extensions": [
        {
            "name": "forwarded",
            "typed_config": {
                "@type": f"{_TYPES}envoy.extensions.http.early_header_mutation."
                "header_mutation.v3.HeaderMutation",
                "mutations": [{"remove": "x-forwarded-for"}],
            },
        }
    ],
}
#: What Envoy itself refuses, in this API's form.
_LOCAL_REPLIES = {
    "mappers": [
        {
            # Nothing but ``_paths`` forbids anything.
            "filter": {
                "status_code_filter": {
                    "comparison": {
                        "op": "EQ",
                        "value": {"default_value": 403, "runtime_key": "unused"},
                    }
                }
            },
            "status_code": 404,
            "body": {"inline_string": "Not Found"},
        }
    ],
    "body_format": {
        "json_format": {"error": "%LOCAL_REPLY_BODY%"},
        "content_type": "application/json",
    },
}


def _paths() -> dict[str, Any]:
    """Refuses paths that are no text: pyvoy would leave whoever asks for one without an answer."""
    any_digit, more = "[0-9a-f]", "%[89ab][0-9a-f]"
    escapes = (
        f"%[0-7]{any_digit}",
        f"%(?:c[2-9a-f]|d{any_digit}){more}",
        f"%e0%[ab]{any_digit}{more}",
        f"%e[1-9abcef](?:{more}){{2}}",
        f"%ed%[89]{any_digit}{more}",
        f"%f0%[9ab]{any_digit}(?:{more}){{2}}",
        f"%f[123](?:{more}){{3}}",
        f"%f4%8{any_digit}(?:{more}){{2}}",
    )
    text = f"(?i)(?:[!-$&-~]|{'|'.join(escapes)})*"
    return {
        "name": "envoy.filters.http.rbac",
        "typed_config": {
            "@type": f"{_TYPES}envoy.extensions.filters.http.rbac.v3.RBAC",
            "rules": {
                "action": "ALLOW",
                "policies": {
                    "paths that are text": {
                        "permissions": [{"url_path": {"path": {"safe_regex": {"regex": text}}}}],
                        "principals": [{"any": True}],
                    }
                },
            },
        },
    }


def _python(module: Path, application: str) -> dict[str, Any]:
    configuration = {"app": application, "interface": "asgi", "lifespan": True}
    return {
        "name": "pyvoy",
        "typed_config": {
            "@type": f"{_TYPES}envoy.extensions.filters.http.dynamic_modules.v3."
            "DynamicModuleFilter",
            "dynamic_module_config": {"module": {"local": {"filename": str(module)}}},
            "filter_name": "pyvoy",
            "terminal_filter": True,
            "filter_config": {
                "@type": f"{_TYPES}google.protobuf.StringValue",
                "value": json.dumps(configuration),
            },
        },
    }


def _seconds(seconds: float) -> str:
    return f"{seconds:g}s"

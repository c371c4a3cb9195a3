"""A known-bad decoder: JSON is parsed by one call, on the event loop, into Python's own lists."""

from gateway import offload
from gateway.wire import json_pieces

json_pieces.LONG_BYTES = 1 << 40
offload.INLINE_BYTES = 1 << 40

"""Known-bad codecs: JSON is parsed by one call, into Python's own lists, and replies are written,
on the event loop."""

from modelport.gateway.protocols import response_encoding
from modelport.gateway.runtime import offload
from modelport.gateway.wire import incremental_json

incremental_json.LONG_BYTES = 1 << 40
offload.INLINE_BYTES = 1 << 40
response_encoding.is_large = lambda outputs: False

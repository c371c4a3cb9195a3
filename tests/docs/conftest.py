from __future__ import annotations

from tests.exporters.economy import (
    _each_collection_looks_at_what_is_new,
    _one_conversion_a_model,
    _one_list_of_operators,
)

__all__ = [
    "_each_collection_looks_at_what_is_new",
    "_one_conversion_a_model",
    "_one_list_of_operators",
]

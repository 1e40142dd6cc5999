"""What came after the paper: Llama's layer, experts, context parallelism, chunked losses, offloading and 8 bits.

As in ``actmem``, each name loads its module when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actmem_more.llama import LlamaLayer as LlamaLayer
    from actmem_more.llama_shape import LlamaShape as LlamaShape

_HOMES = {"LlamaLayer": "llama", "LlamaShape": "llama_shape"}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'actmem_more' has no attribute {name!r}")
    return getattr(import_module(f"actmem_more.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

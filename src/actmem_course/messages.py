"""What ranks say to each other, as JSON: values and known classes, never code.

A pickle runs what its writer likes.  Whoever can reach a store could write one, so what comes out
of a store is read by rules: JSON's own values, tuples, tensors, and dataclasses of the reader's own
``MESSAGE_KINDS``.
"""

from __future__ import annotations

import base64
import json
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from actmem_course import results

#: Classes that may be made from a message, by name.
MESSAGE_KINDS: dict[str, type] = {}
Kind = TypeVar("Kind", bound=type)


class BadMessage(ValueError):
    """What was read is no message of ours."""


def message(kind: Kind) -> Kind:
    """Let instances of this dataclass travel."""
    MESSAGE_KINDS[kind.__name__] = kind
    return kind


for _kind in vars(results).values():
    if isinstance(_kind, type) and is_dataclass(_kind):
        message(_kind)


def encoded(value: object) -> bytes:
    """``value`` as JSON.  Raises TypeError for what may not travel."""
    return json.dumps(_plain(value), ensure_ascii=False).encode()


def decoded(text: bytes) -> Any:
    """The value that ``encoded`` was given.  Raises BadMessage on anything else."""
    try:
        return _value(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError, AssertionError) as error:
        raise BadMessage(f"no message of ours: {type(error).__name__}: {str(error)[:80]}") from None


def _plain(value: object) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(one) for one in value]
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
        text = base64.b64encode(raw).decode()
        return {"tensor": str(data.dtype)[6:], "shape": list(data.shape), "raw": text, "device": value.device.type}
    if isinstance(value, tuple):
        return {"tuple": [_plain(one) for one in value]}
    if type(value) in (set, frozenset):
        return {type(value).__name__: [_plain(one) for one in value]}  # type: ignore[attr-defined]
    if type(value) is dict:
        return {"dict": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if is_dataclass(value) and MESSAGE_KINDS.get(type(value).__name__) is type(value):
        own = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"kind": type(value).__name__, "fields": own}
    raise TypeError(f"a {type(value).__name__} may not travel between ranks")


def _value(plain):
    if isinstance(plain, list):
        return [_value(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if "kind" in plain:
        return MESSAGE_KINDS[plain["kind"]](**{name: _value(one) for name, one in plain["fields"].items()})
    if "tensor" in plain:
        dtype = getattr(torch, plain["tensor"])
        raw = bytearray(base64.b64decode(plain["raw"]))
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(plain["shape"]).to(plain["device"])  # of the same kind; the reader's own, where several are
    if "dict" in plain:
        return {_value(key): _value(one) for key, one in plain["dict"]}
    for made in (tuple, set, frozenset):
        if made.__name__ in plain:
            return made(map(_value, plain[made.__name__]))
    raise ValueError("an object of no known form")

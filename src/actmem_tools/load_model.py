"""Load a factory, ``pkg.module:factory`` or ``file.py:factory``, and run the model that it makes.

A factory is a function that returns ``(model, inputs)``.  The inputs are a tuple of positional arguments or a dict of
keyword arguments.  If the factory takes sizes as keyword arguments, such as ``seq_length=128``, they can be set on the
command line.
"""

import contextlib
import functools
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmem.config import ConfigError
from actmem.ledger.census import arguments_of
from actmem.ledger.storages import replaced
from actmem.torch_private import fake_tensors, no_dispatch_modes, tree_map_only
from actmem_tools.command_line import one_line
from actmem_tools.no_device import cuda_without_device
from actmem_tools.torch_private import is_fake, lacks_values, plain_tensors

#: For each letter the names, besides the letter itself, that a factory's argument for this size may have.
SIZE_NAMES = {
    "s": ("seq_length", "seq_len", "sequence_length", "length"),
    "b": ("batch_size", "micro_batch_size", "batch"),
    "h": ("hidden_size", "hidden", "d_model", "dim"),
    "a": ("num_attention_heads", "num_heads", "heads", "n_heads"),
    "k": ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads"),
    "f": ("intermediate_size", "ffn_hidden_size", "ffn_size", "mlp_size"),
    "l": ("num_layers", "num_hidden_layers", "layers", "n_layers"),
    "v": ("vocab_size", "vocab"),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

#: What fake tensors were taken for that real ones may not be, since ``tensors_for`` last began, in sentences.
ASSUMED: set[str] = set()


class Raised(ConfigError):
    """Error: the user's code raised an exception, in the factory, in forward or in backward."""


def load_factory(target: str) -> Callable[..., Any]:
    """Import the function that ``target`` names: ``pkg.module:factory`` or ``file.py:factory``.

    Args:
        target: the path or the dotted name of a module, a colon, and the function's name.

    Raises: ConfigError if there is no such function, or if its file can't be loaded.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ConfigError("target", f"must be pkg.module:factory or file.py:factory, got {target!r}")
    factory: Any = _module(place)
    for part in name.split("."):
        if not hasattr(factory, part):
            raise ConfigError("target", f"{place} has no {name}")
        factory = getattr(factory, part)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise ConfigError(
            "target", f"{target} is a {type(factory).__name__}, not a function that returns (model, inputs)"
        )
    return factory


def _module(place: str) -> Any:
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ConfigError("target", f"there is no file {place}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        load: Callable[[], Any] = partial(spec.loader.exec_module, module)
        sys.path.insert(0, str(path.parent.resolve()))
    else:
        load = partial(pkgutil.resolve_name, place)
        sys.path.insert(0, os.getcwd())
    try:
        with _quiet():
            loaded = load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError("target", f"{place} can't be loaded: {one_line(error)}") from error
    finally:
        del sys.path[0]
    return module if place.endswith(".py") else loaded


def built_model(
    factory: Callable[..., Any], sizes: Mapping[str, int], dtype: str = "", device: str = "cpu"
) -> tuple[nn.Module, Any]:
    """Call a factory, and return its model and inputs.

    Args:
        factory: the user's function; it takes sizes by keyword and returns a model and its inputs.
        sizes: the value of each size by its letter, such as {"s": 128}.  The factory must take each size as a keyword:
            the letter, or one of the letter's long names, such as ``seq_length`` (``SIZE_NAMES``).
        dtype: the dtype to which weights and floating-point inputs are converted, such as "bfloat16" (``DTYPES``); ""
            leaves them as they are.
        device: "cpu" or "cuda", to which model and inputs are moved.

    Raises: ConfigError if the factory doesn't take a size, if it raises, or if it doesn't return a model and inputs.
    """
    taken = {}
    for size, value in sizes.items():
        if not (keyword := keyword_of(factory, size)):
            rule = f"the factory takes none of {', '.join((size, *SIZE_NAMES.get(size, ())))}"
            raise ConfigError(size, rule)
        taken[keyword] = value
    there = {"device": device} if device != "cpu" and keyword_of(factory, "device") else {}
    before = torch.get_default_dtype()
    try:
        if dtype:
            torch.set_default_dtype(DTYPES[dtype])
        with _quiet():
            built = factory(**taken, **there)
        _take_rows_as_whole_sequences()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise Raised("target", f"the factory raised {one_line(error)}") from error
    finally:
        torch.set_default_dtype(before)
    if not isinstance(built, tuple) or len(built) != 2 or not isinstance(built[0], nn.Module):
        got = f"a tuple of {len(built)}" if isinstance(built, tuple) else f"a {type(built).__name__}"
        raise ConfigError("target", f"the factory must return (model, inputs), and returned {got}")
    model, inputs = built
    to: dict[str, Any] = {"device": device} if device != "cpu" else {}
    if dtype:
        to["dtype"] = DTYPES[dtype]
    if to:
        model.to(**to)

        def moved(tensor: Tensor) -> Tensor:
            new = tensor.detach().to(**to) if tensor.is_floating_point() else tensor.detach().to(device)
            return new.requires_grad_(tensor.requires_grad)

        args, kwargs = arguments_of(inputs)
        inputs = tree_map_only(Tensor, moved, kwargs or args)
    return model, inputs


def _take_rows_as_whole_sequences() -> None:
    """Let Hugging Face's models assume, on fake tensors, that each row of the batch is one sequence without padding.

    These models read the values of position ids to find out whether a row packs several sequences, and the values of a
    mask to find out whether it masks anything.  Fake tensors have no values, so the models would assume the worst case,
    and make a mask and repeated keys and values for it: on an H200 that was 3% more at the peak of Llama 3.2 1B.
    """
    masks = sys.modules.get("transformers.masking_utils")
    for name in ("find_packed_sequence_indices", "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        if (original := getattr(masks, name, None)) and not hasattr(original, "__wrapped__"):
            setattr(masks, name, _without_fake(original))


def _without_fake(original: Callable) -> Callable:
    """Wrap a function of transformers that reads the values of its first argument, position ids or a mask of padding.

    Returns: a function that calls ``original`` for tensors with values.  For fake position ids it returns None: there
        are no packed sequences.  For a fake mask, after which there are further arguments, it calls ``original`` with
        None in place of the mask.
    """

    @functools.wraps(original)
    def run(ids_or_mask: Any, *sizes: Any) -> Any:
        if is_fake(ids_or_mask) and sizes:
            ASSUMED.add("attention_mask counts as all ones: fake tensors have no values, and padded rows may keep more")
            ids_or_mask = None
        return None if is_fake(ids_or_mask) else original(ids_or_mask, *sizes)

    return run


def gradient_note(names: Iterable[str]) -> str:
    """Return a warning that some weights got no gradient in backward, with the usual causes.

    Args:
        names: names of the trainable parameters that got no gradient.

    Returns: one line; "" if there are no names.
    """
    kinds = [*dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name) for name in names)]
    if not kinds:
        return ""
    shown = f"{', '.join(kinds[:3])}{' and others' if len(kinds) > 3 else ''}"
    return (
        f"No gradient reaches {shown}, which are to be trained: forward doesn't use them, or a reentrant checkpoint "
        "whose inputs need no gradients cuts them off (use_reentrant=False, or model.enable_input_require_grads())."
    )


def run_forward(model: nn.Module, inputs: Any) -> Any:
    """Run a model's forward, ``model(*inputs)`` or ``model(**inputs)``, and return its output.

    Args:
        model: the model.
        inputs: a tuple of positional arguments, a dict of keyword arguments, or any other value as the only argument.

    Raises: ConfigError if the model's forward raises any exception.
    """
    args, kwargs = arguments_of(inputs)
    try:
        with _quiet():
            return model(*args, **kwargs)
    except Exception as error:
        rule = f"the model's forward raised {one_line(error)}"
        if lacks_values(error):
            rule += ": what it runs depends on values, which fake tensors don't have; record works without --fake"
        raise Raised("inputs", rule) from error


@contextlib.contextmanager
def tensors_for(fake: bool, device: str = "cpu") -> Iterator[None]:
    """Make a context in which models are made and run on real tensors, or on torch's fake ones (shapes, no values).

    Args:
        fake: True for fake tensors, False for real ones.
        device: "cpu" or "cuda".  Fake tensors can be on "cuda" on a machine without a GPU too: they imitate an H100's.
    """
    ASSUMED.clear()
    with contextlib.ExitStack() as stack:
        if fake:
            stack.enter_context(fake_tensors())
            stack.enter_context(replaced(nn.Module, "_apply", lambda original: _applied))
            stack.enter_context(
                replaced(nn.init, "_no_grad_trunc_normal_", lambda original: lambda tensor, *_, **__: tensor)
            )
            stack.enter_context(replaced(torch, "linspace", _real))
        if fake and device == "cuda" and not torch.cuda.is_available():
            stack.enter_context(cuda_without_device())
        yield


def _applied(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Stands in for ``Module._apply``, which ``.to``, ``.bfloat16`` and ``.cuda`` call, on fake parameters.

    torch's own method swaps a parameter's tensor in place, which fake tensors don't allow.  Tied weights stay tied.
    """
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            new = vars(parameter).get("_applied")
            if new is None:
                new = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
                vars(parameter)["_applied"] = new
            module._parameters[name] = new
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


class _Real(Tensor):
    """A tensor with values among fake ones, for ``torch.linspace``: models read rates of dropped paths from it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        into_fake = any(isinstance(argument, Tensor) and is_fake(argument) for argument in args)
        if into_fake or not all(issubclass(argument, cls) for argument in types):
            with plain_tensors():
                args, kwargs = tree_map_only(cls, lambda real: real.as_subclass(Tensor), (args, kwargs or {}))
                return func(*args, **kwargs)
        with no_dispatch_modes():
            return super().__torch_function__(func, types, args, kwargs)


def _real(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args, **kwargs):
        with no_dispatch_modes():
            return original(*args, **kwargs).as_subclass(_Real)

    return run


def keyword_of(factory: Callable[..., Any], size: str) -> str:
    """Return the keyword by which a factory takes a size: the letter or one of its ``SIZE_NAMES``; "" if none.

    Args:
        factory: the user's function.
        size: the size's letter, such as "s"; or another keyword, such as "device".
    """
    names = (size, *SIZE_NAMES.get(size, ()))
    try:
        return next((name for name in names if name in inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):  # it has no signature
        return ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Make a context for the user's code, in which what it prints goes to standard error, not among the results.

    transformers then logs errors only.
    """
    if logging := sys.modules.get("transformers.utils.logging"):
        logging.set_verbosity_error()
    with contextlib.redirect_stdout(sys.stderr):
        yield

"""Build the model of a Hugging Face configuration with fewer layers than it has, so that it can be run and recorded.

All other sizes are those of the configuration.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from typing import Any

import torch
from torch import nn

from actmem.config import LARGEST_SIZE, ConfigError
from actmem_tools import load_model
from actmem_tools.command_line import one_line, show_progress
from actmem_tools.config_file import OTHERWISE, Order, order_of

#: Names of fields of a configuration: from how many tokens on a layer's attention needs a mask for its window; and how
#: many tokens make up a chunk of a scan.
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")
_CHUNKS = ("mamba_chunk_size", "chunk_size")
#: The longest sequence of the runs that a tape is solved from, as a multiple of the shortest one.
_LONGEST_RUN = 19
#: Attributes of a layer whose names match this say only where it is in the model.
_PLACE = re.compile("idx|index|layer_id|layer_number")


class ConfigModel:
    """A Hugging Face model that ``actmem plan`` is given as a ``config.json``.

    Args:
        given: the content of the ``config.json``, from ``config_file.read_config``.

    Attributes:
        config: transformers' configuration of the text part of the model.
        letters: letters of the sizes that the configuration leaves open: b, and for text also s.
        number: how many layers the model has; with an encoder and a decoder, how many layers the decoder has.
        order: how kinds of layers alternate (``config_file.Order``).
        positions: the longest sequence that the model's learned positions allow; ``LARGEST_SIZE`` if it has none.

    An encoder before a decoder always has as many layers as the configuration says; only the decoder's layers vary.

    Raises: ConfigError if transformers doesn't have the model, if the model doesn't have layers, or if it reads
        something else than text, speech or images.
    """

    def __init__(self, given: Mapping[str, Any]):
        show_progress("importing transformers")
        try:
            import transformers
        except ImportError as error:
            raise ConfigError("target", "a config.json needs transformers: pip install transformers") from error
        transformers.utils.logging.set_verbosity_error()
        kind = given["model_type"]
        try:
            whole = transformers.AutoConfig.for_model(**given)
        except Exception as error:
            rule = f"{kind} is no configuration that transformers knows: {one_line(error)}"
            raise ConfigError("target", rule) from error
        self.config = whole.get_text_config()
        pictures = transformers.AutoModelForImageClassification
        every: tuple[Any, ...] = (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, pictures)
        if whole.is_encoder_decoder:
            every = transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForSpeechSeq2Seq
        found = [auto for auto in every if type(self.config) in auto._model_mapping]
        named = getattr(whole, "architectures", None) or ()
        found.sort(key=lambda auto: not any(name in str(auto._model_mapping[type(self.config)]) for name in named))
        of_decoder = (name for name in ("num_decoder_layers", "decoder_layers") if hasattr(self.config, name))
        self._length = next(of_decoder, "num_hidden_layers")
        number = getattr(self.config, self._length, None)
        if not found or not isinstance(number, int):
            rule = f"{kind} is no model of layers that reads text or speech, or classifies pictures"
            raise ConfigError("target", f"{rule}: {OTHERWISE} works")
        self._auto, self.number, self.order = found[0], number, Order(0, number)
        self.letters = ("b",) if found[0] is pictures else ("s", "b")
        with load_model.tensors_for(True):
            model, _ = load_model.built_model(self.factory(), {"s": 2, "b": 2, "l": 1}, "bfloat16")
        layers = model.get_submodule(lists_of_layers(model, number)[0])
        order = order_of([_kind(layer) for layer in layers.children()])
        self.order = Order(order.first, order.period, whole.is_encoder_decoder)
        positions = getattr(self.config, "max_position_embeddings", None) or LARGEST_SIZE
        self.positions = positions if _has_rows(model, positions, self.config) else LARGEST_SIZE

    @property
    def num_blocks(self) -> int:
        """How many blocks of ``order.period`` layers the configuration's model has."""
        return (self.number - self.order.first) // self.order.period

    def factory(self, vocab_size: int = 0) -> Callable[..., tuple[nn.Module, dict[str, torch.Tensor]]]:
        """Return a function that builds the model and its inputs.

        Args:
            vocab_size: size of the vocabulary; 0 to use the configuration's.

        Returns: a function of b, l (the number of blocks) and, for text, s, which returns (model, inputs).
        """

        def made(b: int, l: int, s: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:  # noqa: E741
            own, layers = deepcopy(self.config), self.order.num_layers(l)
            for name, values in vars(own).items():
                if isinstance(values, (list, tuple)) and len(values) == self.number:
                    setattr(own, name, [values[self.order.place(i)] for i in range(layers)])
            setattr(own, self._length, layers)
            if getattr(own, "num_blocks", None) == self.number:  # another name of it, as xLSTM has
                own.num_blocks = layers
            own.use_cache, own.bos_token_id, own.eos_token_id, own.decoder_start_token_id = False, 0, 0, 0
            with contextlib.suppress(Exception):  # some must have a number, as a decoder whose input has this in front
                own.pad_token_id = 0 if own.is_encoder_decoder else None
            if "s" not in self.letters:
                sides = (own.image_size,) * 2 if isinstance(own.image_size, int) else own.image_size
                pictures, labels = torch.randn(b, own.num_channels, *sides), torch.zeros(b, dtype=torch.long)
                return self._auto.from_config(own), {"pixel_values": pictures, "labels": labels}
            own.vocab_size = vocab_size or own.vocab_size
            ids = torch.randint(0, own.vocab_size, (b, s))
            if hasattr(own, "num_mel_bins"):  # it reads speech, always of this length
                features = torch.randn(b, own.num_mel_bins, 2 * own.max_source_positions)
                return self._auto.from_config(own), {"input_features": features, "labels": ids}
            return self._auto.from_config(own), {"input_ids": ids, "labels": ids}

        return made

    def _numbers(self, names: Sequence[str]) -> set[int]:
        """Collect the whole numbers that the configuration has under these names, for any of its layers."""
        layers = getattr(self.config, "per_layer_config", None)  # transformers has it from 5 on
        configs = [*layers] if layers else [self.config]
        return {number for one in configs for name in names if isinstance(number := getattr(one, name, None), int)}

    def limits(self, s: int) -> tuple[int, int]:
        """Return the shortest and the longest sequence, in tokens, that run the same operations as ``s`` tokens do.

        Attention with a sliding window, for example, needs a mask only if the sequence is longer than the window; and a
        scan of one chunk doesn't copy what a scan of two does.
        """
        windows = self._numbers(_WINDOWS) | {2 * chunk for chunk in self._numbers(_CHUNKS)}
        above = [w - 1 for w in windows if w > s]
        return max((w for w in windows if w <= s), default=2), min(above + [self.positions])

    def multiple(self, of_loss: int) -> int:
        """Return a number of tokens that must divide the length of each sequence for which the formulas shall hold.

        Layers such as Mamba's go through the sequence in chunks of a fixed length, and the last chunk must be full.

        Args:
            of_loss: in how many chunks the loss is computed, which must divide the length too; 1 if it has no chunks.

        Returns: the least common multiple of ``of_loss`` and of the chunks' lengths.
        """
        return math.lcm(of_loss, *self._numbers(_CHUNKS))

    def step(self, s: int, multiple: int) -> int:
        """Return the step between the sequence lengths of the tiny runs: each length is a multiple of it.

        The formulas for ``s`` tokens are found from these runs, so they must run the same operations as ``s`` tokens.

        Args:
            s: the tokens of a sequence that the user asked for.
            multiple: a number by which each sequence's length must be divisible, from the method ``multiple``.

        Returns: the step, in tokens.  0 if there is none, because the longest run would be too long to run the same
            operations, or because ``multiple`` does not divide ``s``: then each run must have exactly ``s`` tokens.
        """
        shortest, longest = self.limits(s)
        step = multiple * (-(-shortest // multiple) if shortest > 2 else 1)
        return step if _LONGEST_RUN * step <= longest and s % multiple == 0 else 0


def lists_of_layers(model: nn.Module, number: int) -> list[str]:
    """Find the submodules, such as ``model.layers``, whose children may be the model's layers.

    Args:
        model: the model.
        number: how many layers it has.

    Returns: the submodules' paths, such as "model.layers", the one with the most weights first.

    Raises: ConfigError if there is no such submodule.
    """
    found = [
        (sum(p.numel() for p in part.parameters()), name)
        for name, part in model.named_modules()
        if len(children := list(part.children())) == number
        and (isinstance(part, nn.ModuleList) or len({type(child) for child in children}) == 1)
    ]
    if not found:
        rule = f"with num_layers={number} the model must have a list of {number} blocks, and has none"
        raise ConfigError("target", f"{rule}: record --fake --at works")
    return [name for _, name in sorted(found, reverse=True)]


def noted_layers(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """Let a model record in which order its layers run.

    Args:
        model: the model; its layers get hooks.
        paths: the paths of lists of layers, from ``lists_of_layers``.

    Returns: an empty list, to which each later forward pass appends, for every layer that runs, the path of the list
        that the layer is in.
    """
    in_order: list[str] = []
    for path in paths:
        for layer in model.get_submodule(path).children():
            layer.register_forward_pre_hook(lambda *_, path=path: in_order.append(path))
    return in_order


def are_stacks(in_order: Iterable[str], *paths: str) -> bool:
    """Return whether all layers of one list ran before those of the other, like an encoder's before a decoder's.

    Args:
        in_order: the paths of the layers' lists in the order in which the layers ran: the list of ``noted_layers``
            after a forward pass.
        paths: the paths of the two lists of layers.
    """
    return len([*groupby(path for path in in_order if path in paths)]) == 2


def _kind(layer: nn.Module) -> str:
    """Return a text that is equal for layers that run the same operations.

    It has the layer's submodules, the numbers and strings in them, and the shapes of its weights.
    """

    def held(part: nn.Module) -> Iterable:
        return sorted((x, y) for x, y in vars(part).items() if isinstance(y, (int, str)) and not _PLACE.search(x))

    parts = [(name, type(part).__name__, *held(part)) for name, part in layer.named_modules()]
    return f"{parts} {[(name, tuple(p.shape)) for name, p in layer.named_parameters()]}"


def _has_rows(model: nn.Module, positions: int, config: Any) -> bool:
    """Return whether some embedding of the model has a row for each position, or up to two rows more, as OPT's has."""
    rows = {part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)}
    return any(positions <= number <= positions + 2 for number in rows - {getattr(config, "vocab_size", 0)})

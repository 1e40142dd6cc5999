"""Forty models that nobody here wrote or that are written as others write theirs, at tiny sizes.

``MODELS``: name → a function of sizes by letter that returns the model and its inputs.  ``LETTERS``: name → the letters that it
takes, as ``tape --letters`` reads them.  Those of transformers are made from their configurations; nothing is downloaded.
"""

import inspect
import re
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MODELS: dict[str, Any] = {}
LETTERS: dict[str, str] = {}
#: Models of transformers, which is not always installed.
HUGGING_FACE: set[str] = set()


def _built(kind: str, auto: str, fields: dict[str, Any], inputs: dict[str, torch.Tensor]) -> tuple[nn.Module, dict]:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **fields)
    return getattr(transformers, auto).from_config(config).train(), inputs


def _language(kind, names, fixed, auto, s, b, **letters):
    inside = {name: letters[x] for x, name in names.items()}
    if "width" in fixed:
        inside[fixed["width"]] = letters["h"]
    ids = 3 + torch.randint(0, letters["v"] - 3, (b, s))
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    ends |= {"max_position_embeddings": 512, "num_hidden_layers": 2}
    fields = {**ends, **{x: y for x, y in fixed.items() if x != "width"}, **inside}
    return _built(kind, auto, fields, {"input_ids": ids, "labels": ids.clone()})


_USUAL = {"h": "hidden_size", "a": "num_attention_heads", "f": "intermediate_size", "v": "vocab_size"}
_GROUPED = {**_USUAL, "k": "num_key_value_heads"}
_N = {"h": "n_embd", "a": "n_head", "v": "vocab_size"}
_LATE = {"use_cache": False}
CAUSAL: dict[str, tuple[dict, dict]] = {
    **{kind: (_GROUPED, _LATE) for kind in ("llama", "mistral", "qwen2", "phi3", "olmo2", "granite")},
    "qwen3": (_GROUPED, {**_LATE, "head_dim": 8}),
    "gemma": (_GROUPED, {**_LATE, "head_dim": 8}),
    "gemma2": (_GROUPED, {**_LATE, "head_dim": 8, "attn_implementation": "eager"}),
    "mixtral": (_GROUPED, {**_LATE, "num_local_experts": 4, "experts_implementation": "batched_mm"}),
    "gpt_neox": (_USUAL, _LATE),
    "gpt2": (_N, {"use_cache": False, "n_layer": 2, "n_positions": 512}),
    "opt": ({"h": "hidden_size", "a": "num_attention_heads", "f": "ffn_dim", "v": "vocab_size"}, {**_LATE, "width": "word_embed_proj_dim"}),
    "bloom": ({"h": "hidden_size", "v": "vocab_size"}, {**_LATE, "n_layer": 2, "n_head": 4}),
    "falcon": ({x: _USUAL[x] for x in "hav"}, {**_LATE, "new_decoder_architecture": False}),
    "mamba": ({"h": "hidden_size", "v": "vocab_size"}, {**_LATE, "state_size": 4, "time_step_rank": 4, "use_mambapy": False}),
}  # fmt: skip
MASKED = {
    "bert": (_USUAL, {}),
    "roberta": (_USUAL, {}),
    "albert": (_USUAL, {"embedding_size": 12}),
    "distilbert": ({"h": "dim", "a": "n_heads", "f": "hidden_dim", "v": "vocab_size"}, {"n_layers": 2}),
    "deberta-v2": (_USUAL, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
}
SEQUENCES = {
    "t5": ({"h": "d_model", "a": "num_heads", "f": "d_ff", "v": "vocab_size"}, {**_LATE, "d_kv": 8, "num_layers": 2, "decoder_start_token_id": 0}),
}  # fmt: skip


def _rules(letters: str) -> str:
    """Heads of 8 features; query heads in groups of key heads."""
    rules = {"h": "h:8a" if "a" in letters else "h:8", "a": "a:k" if "k" in letters else "a"}
    return ",".join(rules.get(letter, letter) for letter in letters)


def _add(name: str, factory: Any, letters: str) -> None:
    """A model of transformers by its sizes, which its signature shows."""
    plain = re.findall(r"(\w)(?::\w+)?", letters)
    factory.__signature__ = inspect.Signature([inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in plain])
    MODELS[name], LETTERS[name] = factory, letters
    HUGGING_FACE.add(name)


for table, auto in (
    (CAUSAL, "AutoModelForCausalLM"),
    (MASKED, "AutoModelForMaskedLM"),
    (SEQUENCES, "AutoModelForSeq2SeqLM"),
):
    for kind, (names, fixed) in table.items():
        one_length = {"s": 8} if kind == "mamba" else {}  # it runs once for each token
        letters = "".join(x for x in ("s", "b", *names) if x not in one_length)
        _add(kind, partial(_language, kind, names, fixed, auto, **one_length), _rules(letters))


def _pictures(kind, fixed, b, i, h):
    fields = {name: value(h) if callable(value) else value for name, value in fixed.items()}
    fields = {"image_size": (i, 32), "num_labels": 5, **fields}
    inputs = {"pixel_values": torch.randn(b, 3, i, 32), "labels": torch.arange(b) % 5}
    return _built(kind, "AutoModelForImageClassification", fields, inputs)


_VIT = {"hidden_size": lambda h: h, "num_attention_heads": 4, "intermediate_size": 48}
_VIT |= {"num_hidden_layers": 2, "patch_size": 4}
PICTURES: dict[str, tuple[dict[str, Any], str]] = {
    "vit": (_VIT, "i:4"),
    "beit": ({**_VIT, "drop_path_rate": 0.1, "use_relative_position_bias": True}, "i:4"),
    "dinov2": ({**_VIT, "image_size": 32}, ""),
    "convnext": ({"hidden_sizes": lambda h: [h, h, 2 * h, 2 * h], "depths": [1, 1, 1, 1], "drop_path_rate": 0.1}, "i:32"),
    "resnet": ({"hidden_sizes": lambda h: [h, 2 * h], "embedding_size": 8, "depths": [1, 1], "layer_type": "basic"}, "i:16"),
    "swin": ({"embed_dim": lambda h: h, "depths": [2], "num_heads": [4], "window_size": 4, "patch_size": 4}, "i:16"),
    "efficientnet": ({"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128}, "i:32"),
}  # fmt: skip
for kind, (fixed, rule) in PICTURES.items():
    one_size = {} if rule else {"i": 32}  # its positions are of squares
    _add(kind, partial(_pictures, kind, fixed, **one_size), f"b,{rule},h:8" if rule else "b,h:8")


def clip(b, s, h):
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    side = {"hidden_size": h, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    words = {**side, "vocab_size": 64, "max_position_embeddings": 256, "eos_token_id": 2}
    config = CLIPConfig(text_config=words, vision_config={**side, "image_size": 16, "patch_size": 4}, projection_dim=16)
    ids = 3 + torch.randint(0, 61, (b, s))
    return CLIPModel(config), {"input_ids": ids, "pixel_values": torch.randn(b, 3, 16, 16), "return_loss": True}


_add("clip", clip, "b,s,h:8")


class Of(nn.Module):
    """A function of parts and inputs as a module."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleDict(parts)

    def forward(self, *inputs):
        return self.function(self.parts, *inputs)


def encoder(s, b, h, a, f):
    layer = nn.TransformerEncoderLayer(h, a, f, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(b, s, h),)


def transformer(s, b, h, a, f):
    return nn.Transformer(h, a, 1, 1, f, batch_first=True), (torch.randn(b, s, h), torch.randn(b, 7, h))


def lstm(s, b, h):
    return Of(lambda m, x: m["rnn"](x)[0], rnn=nn.LSTM(h, h, 2)), (torch.randn(5, b, h),)


def unet(b, i, c):
    """A diffusion model's: group norms, SiLU, attention at the lowest resolution, a skip."""

    def run(m, x):
        down = F.silu(m["norm"](m["in"](x)))
        low = F.silu(m["down"](down))
        q, k, v = m["qkv"](low.flatten(2).transpose(1, 2)).chunk(3, -1)
        low = low + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(low.shape)
        return m["out"](torch.cat([F.interpolate(low, scale_factor=2.0), down], 1))

    parts = {"in": nn.Conv2d(3, c, 3, padding=1), "norm": nn.GroupNorm(4, c), "down": nn.Conv2d(c, c, 3, 2, 1)}
    return Of(run, **parts, qkv=nn.Linear(c, 3 * c), out=nn.Conv2d(2 * c, 3, 3, padding=1)), (torch.randn(b, 3, i, 32),)


def recommender(b, h, v):
    """DLRM: embeddings, all dot products of pairs, an MLP."""

    def run(m, ids):
        x = m["words"](ids)
        pairs = (x @ x.transpose(1, 2)).flatten(1)
        return F.binary_cross_entropy_with_logits(m["top"](pairs).squeeze(-1), torch.zeros(b))

    top = nn.Sequential(nn.Linear(64, h), nn.ReLU(), nn.Linear(h, 1))
    return Of(run, words=nn.Embedding(v, h), top=top), (torch.randint(0, v, (b, 8)),)


def linear_attention(s, b, h):
    """A softmax over features: no scores of tokens with tokens."""

    def run(m, x):
        q, k, v = m["qkv"](x).chunk(3, -1)
        return m["out"](q.softmax(-1) @ (k.softmax(1).transpose(1, 2) @ v))

    return Of(run, qkv=nn.Linear(h, 3 * h), out=nn.Linear(h, h)), (torch.randn(b, s, h),)


def contrast(b, h, f):
    """Logits [b, b] of all pairs of a batch."""

    def run(m, x, y):
        x, y = (F.normalize(m["tower"](z), dim=-1) for z in (x, y))
        return F.cross_entropy(x @ y.t() * 10, torch.arange(b))

    tower = nn.Sequential(nn.Linear(h, f), nn.GELU(), nn.Linear(f, h))
    return Of(run, tower=tower), (torch.randn(b, h), torch.randn(b, h))


def lora(s, b, h, f):
    """Frozen weights with small trained products beside them, as peft's."""

    def run(m, x):
        for name in ("up", "down"):
            x = F.gelu(m[name](x) + m[f"{name}_b"](F.dropout(m[f"{name}_a"](x), 0.1)))
        return x

    frozen = {"up": nn.Linear(h, f).requires_grad_(False), "down": nn.Linear(f, h).requires_grad_(False)}
    sizes = {"up_a": (h, 4), "up_b": (4, f), "down_a": (f, 4), "down_b": (4, h)}
    small = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
    return Of(run, **frozen, **small), (torch.randn(b, s, h),)


def graph(s, b, h):
    """Messages along a dense [s, s] table of edges, which is no attention."""

    def run(m, x):
        edges = torch.sigmoid(m["left"](x) @ m["right"](x).transpose(1, 2))
        return edges / edges.sum(-1, keepdim=True) @ x

    return Of(run, left=nn.Linear(h, h), right=nn.Linear(h, h)), (torch.randn(b, s, h),)


def squeeze(b, i, c):
    """EfficientNet's gate of channels, and a depthwise convolution, on square pictures."""

    def run(m, x):
        x = F.silu(m["norm"](m["wide"](x)))
        return m["out"](x * torch.sigmoid(m["gate"](F.silu(x.mean((2, 3)))))[..., None, None])

    parts = {"wide": nn.Conv2d(c, c, 3, padding=1, groups=c), "norm": nn.BatchNorm2d(c), "out": nn.Conv2d(c, c, 1)}
    return Of(run, **parts, gate=nn.Linear(c, c)), (torch.randn(b, c, i, i),)


WRITTEN_HERE = {
    "encoder": (encoder, "s,b,h:a,a,f"), "transformer": (transformer, "s,b,h:a,a,f"), "lstm": (lstm, "s,b,h"),
    "unet": (unet, "b,i:4,c:4"),
    "recommender": (recommender, "b,h,v"), "linear_attention": (linear_attention, "s,b,h"),
    "contrast": (contrast, "b,h,f"), "lora": (lora, "s,b,h,f"), "graph": (graph, "s,b,h"),
    "squeeze": (squeeze, "b,i,c"),
}  # fmt: skip
MODELS |= {name: model for name, (model, _) in WRITTEN_HERE.items()}
LETTERS |= {name: letters for name, (_, letters) in WRITTEN_HERE.items()}

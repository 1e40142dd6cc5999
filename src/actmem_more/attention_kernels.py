"""Which kernel ``scaled_dot_product_attention`` runs on an NVIDIA GPU, and what each kernel saves for backward.

Every kernel saves Q, K, V, its output, and in float32 the log-sum-exp of each query.  With grouped queries only math
saves K and V repeated for each query head.  torch takes the first kernel of this list that can run the call:

cuDNN
    Runs: on sm_90 and sm_100 with cuDNN > 9.15, where torch tries it first, and nowhere else; 16 bits; head widths
    that are multiples of 8, up to 128, or 192 with values of 128, or 256 (torch 2.14, cuDNN > 9.22); dropout in steps
    of 1/16; any mask without a gradient.
    Saves besides: seed and offset, 8 B each; the mask.
flash
    Runs: on sm_80 or newer; 16 bits; no mask; values as wide as keys, up to 256; causal only with as many keys as
    queries.
    Saves besides: seed 16 B, offset 8 B; if 8 does not divide the width, padded copies of Q, K, V and the output.
memory-efficient
    Runs: in float32, float16 and from sm_80 on bfloat16; head widths that are multiples of 8 (16 bits) or of 4
    (float32; any width before sm_80); any mask; grouped queries from torch 2.14 on.
    Saves besides: seed and offset, 8 B each, on the CPU; a log-sum-exp padded to 32 queries; the mask.
math
    Runs: everything else.
    Saves besides: the scores, scaled Q and K, repeated K and V; of 16-bit inputs also copies in float32.

Read from torch: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (who can run, in which order) as of 2.14.1,
whose library has the same messages, and ``attention.cpp`` beside it (padding, masks); ``torch/_meta_registrations.py``
of 2.13.0 and 2.14.1 (shapes and dtypes of what is saved); ``torch/nn/functional.py`` of both (which kernel takes
grouped queries).  On a machine with a GPU, nobody needs this list: a small call shows which kernel torch chooses.

An H200 with torch 2.11 and cuDNN 9.19 chose what this list says in 12 of 12 calls, and each kernel saved what it says
(``labs/results``, step "kernels").  From that run come two rules for torch before 2.12: cuDNN takes any dropout, and on
sm_90 heads up to 256 wide.
"""

from dataclasses import dataclass

#: The flash kernel's heads are padded to a multiple of this.
FLASH_WIDTH = 8
_SIXTEEN_BITS = ("float16", "bfloat16")


@dataclass(frozen=True)
class Gpu:
    """A GPU and its software, as far as they decide which attention kernel runs.

    Args:
        capability: the compute capability, (major, minor): (9, 0) is an H100's.
        cudnn: cuDNN's version as ``torch.backends.cudnn.version()`` gives it, 91900 for 9.19; 0 without cuDNN.
        torch: torch's version, (major, minor).
    """

    capability: tuple[int, int] = (9, 0)
    cudnn: int = 91900
    torch: tuple[int, int] = (2, 13)

    @property
    def ranks_cudnn_first(self) -> bool:
        """Whether torch tries cuDNN's kernel first.

        If not, the kernel never runs: torch tries math before it, and math can run any call.
        """
        return self.capability in ((9, 0), (10, 0), (10, 3)) and self.cudnn > 91500


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of a call of ``scaled_dot_product_attention`` that decide which kernel runs.

    Args:
        dtype: the name of the dtype of Q, K and V, such as "bfloat16".
        head_size: elements of one head's query, and of its key.
        value_size: elements of one head's value.
        num_heads: heads of Q.
        num_key_value_heads: heads of K and V; fewer than those of Q where queries are grouped.
        num_queries: tokens of Q.
        num_keys: tokens of K and V.
        masked: whether there is an ``attn_mask``.
        causal: the call's ``is_causal``.
        dropout: the call's ``dropout_p``.
    """

    dtype: str
    head_size: int
    value_size: int
    num_heads: int
    num_key_value_heads: int
    num_queries: int
    num_keys: int
    masked: bool = False
    causal: bool = False
    dropout: float = 0.0


def attention_kernel(gpu: Gpu, call: AttentionCall) -> str:
    """Return the kernel that runs a call in training on a GPU: "cuDNN", "flash", "memory-efficient" or "math"."""
    if gpu.ranks_cudnn_first and _cudnn_runs(gpu, call):
        return "cuDNN"
    if _flash_runs(gpu, call):
        return "flash"
    return "memory-efficient" if _memory_efficient_runs(gpu, call) else "math"


def _cudnn_runs(gpu: Gpu, call: AttentionCall) -> bool:
    widths = call.head_size, call.value_size
    before_212 = gpu.torch < (2, 12)
    widest = 256 if before_212 and gpu.capability == (9, 0) and gpu.cudnn >= 91000 else 128
    large = widths == (192, 128) or widths == (256, 256) and gpu.torch >= (2, 14) and gpu.cudnn > 92200
    return (
        call.dtype in _SIXTEEN_BITS
        and not any(width % 8 for width in widths)
        and (max(widths) <= widest or large)
        and (before_212 or call.dropout * 16 == int(call.dropout * 16))
        and call.num_keys > 1
    )


def _flash_runs(gpu: Gpu, call: AttentionCall) -> bool:
    square = not call.causal or call.num_queries == call.num_keys
    # On these, whose shared memory is small, it has no backward for the widest heads.
    small = gpu.capability[0] == 12 or (8, 6) <= gpu.capability <= (8, 9)
    too_wide = small and call.head_size > 192 and (call.head_size <= 224 or call.dropout > 0)
    return (
        gpu.capability >= (8, 0)
        and call.dtype in _SIXTEEN_BITS
        and not call.masked
        and call.head_size == call.value_size <= 256
        and square
        and not too_wide
    )


def _memory_efficient_runs(gpu: Gpu, call: AttentionCall) -> bool:
    recent = gpu.capability >= (8, 0)
    if call.dtype not in ("float16", "float32", *(("bfloat16",) if recent else ())):
        return False
    tensor_cores = recent or gpu.capability >= (7, 0) and call.dtype == "float16"
    step = (8 if call.dtype in _SIXTEEN_BITS else 4) if tensor_cores else 1
    grouped = call.num_heads != call.num_key_value_heads
    return not (call.head_size % step or call.value_size % step or grouped and gpu.torch < (2, 14))

"""Which attention kernel torch chooses for the named models, and what each kernel saves for backward."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from actmem.rows import total
from actmem_course.lab_tools.gpu_kernel import KERNEL_NODES, attention_rows
from actmem_more.attention_kernels import AttentionCall, attention_kernel
from actmem_tools.no_device import gpu_of_this_build

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class Call(NamedTuple):
    """Sizes of one call of attention, on one rank and for one sequence.

    Attributes:
        name: the call's name in the results, such as "llama3-8b".
        heads: query heads.
        key_heads: heads of K and V.
        width: elements of one head's query, and of its key.
        value_width: elements of one head's value.
        tokens: how many queries there are, and how many keys.
        causal: whether a query sees no later key.
        dropout: the dropout's probability.
    """

    name: str
    heads: int
    key_heads: int
    width: int
    value_width: int
    tokens: int
    causal: bool = True
    dropout: float = 0.0

    def described(self, dtype: str) -> AttentionCall:
        """Convert this call to the argument of ``attention_kernel``, which predicts the kernel that torch chooses.

        Args:
            dtype: the dtype of Q, K and V, such as "bfloat16".
        """
        widths, heads, lengths = (
            (self.width, self.value_width),
            (self.heads, self.key_heads),
            (self.tokens, self.tokens),
        )
        return AttentionCall(dtype, *widths, *heads, *lengths, causal=self.causal, dropout=self.dropout)


#: Heads of one rank of 8, but for the models that one GPU holds.
CALLS = (
    Call("22B", 8, 8, 96, 96, 2048),
    Call("175B with dropout", 12, 12, 128, 128, 2048, dropout=0.1),
    Call("llama3-8b", 32, 8, 128, 128, 8192),
    Call("llama3-70b", 8, 1, 128, 128, 8192),
    Call("llama3-405b", 16, 1, 128, 128, 8192),
    Call("qwen3-32b", 8, 1, 128, 128, 4096),
    Call("qwen3-30b-a3b", 32, 4, 128, 128, 4096),
    Call("deepseek-v3", 16, 16, 192, 128, 4096),
    Call("gemma's wide heads", 8, 4, 256, 256, 4096),
    Call("BERT, not causal", 12, 12, 64, 64, 512, causal=False),
    Call("ViT's odd length", 12, 12, 64, 64, 197, causal=False),
    Call("an odd width", 8, 8, 80, 80, 1024),
)


def measure_kernels(call: Call, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Find which kernel torch chooses for a call, and what each kernel saves beyond Q, K, V and its output.

    Args:
        call: the sizes of Q, K and V.
        device: "cpu" or "cuda".
        dtype: of Q, K and V.

    Returns: a dict with these keys:
        "chosen": the kernel that torch ran: "flash", "memory-efficient", "cuDNN" or "math".
        "by_table": the kernel that ``attention_kernel`` predicts.
        "kernels": for each kernel a dict with the bytes that it saved, and the predicted bytes, which are 4 bytes of
            log-sum-exp for each query and head, and the rows of ``attention_rows``; or with the key "refused", torch's
            reason not to run the call.
    """
    described = call.described(str(dtype).removeprefix("torch."))
    capability = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)
    found: dict[str, Any] = {"by_table": attention_kernel(gpu_of_this_build(capability), described), "kernels": {}}
    found["chosen"] = _run(call, device, dtype)["node"]
    for kernel, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                kept = _run(call, device, dtype)
        except RuntimeError as error:
            found["kernels"][kernel] = {"refused": str(error).strip().partition("\n")[0]}
            continue
        if kernel != "math":
            log_sum_exp = 4 * call.heads * call.tokens
            kept["predicted_bytes"] = log_sum_exp + total(attention_rows(kernel, 1, call.heads, call.tokens))
        found["kernels"][kernel] = kept
    found["chosen"] = next((k for k, node in KERNEL_NODES.items() if found["chosen"].startswith(node)), "math")
    return found


def _run(call: Call, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """One call: its autograd node, what it saved beyond Q, K, V and the output, and what it asked the allocator for."""

    def made(heads: int, width: int) -> torch.Tensor:
        return torch.randn(1, heads, call.tokens, width, device=device, dtype=dtype, requires_grad=True)

    query, key = made(call.heads, call.width), made(call.key_heads, call.width)
    value = made(call.key_heads, call.value_width)
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        # Not the tensor itself: a node that saves its own output would hold itself for ever.
        return tensor.detach()

    before = _requested(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = F.scaled_dot_product_attention(
            query, key, value, dropout_p=call.dropout, is_causal=call.causal, enable_gqa=call.heads != call.key_heads
        )
    known = {tensor.untyped_storage().data_ptr() for tensor in (query, key, value, output)}
    extra = [storage for pointer, storage in saved.items() if pointer not in known]
    return {
        "node": output.grad_fn.name(),  # type: ignore[union-attr]
        "saved_bytes": sum(storage.nbytes() for storage in extra),
        "saved_on_gpu_bytes": sum(storage.nbytes() for storage in extra if storage.device.type == device),
        "requested_bytes": None if before is None else _requested(device) - before - output.untyped_storage().nbytes(),
    }


def _requested(device: str) -> Any:
    """What is alive of what the GPU's allocator was asked for; None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]

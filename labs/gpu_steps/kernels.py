"""Which attention kernel torch chooses for the named models, and what each kernel keeps for backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from actmem.rows import total
from actmem_tools.attention_kernels import KERNEL_NODES, AttentionCall, attention_kernel, attention_rows
from actmem_tools.no_device import gpu_of_this_build

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
#: One rank's share at t = 8: name, query heads, key heads, widths of a query's and a value's head, tokens, causal,
#: dropout.
CALLS = (
    ("22B", 8, 8, 96, 96, 2048, True, 0.0),
    ("175B with dropout", 12, 12, 128, 128, 2048, True, 0.1),
    ("llama3-8b", 32, 8, 128, 128, 8192, True, 0.0),
    ("llama3-70b", 8, 1, 128, 128, 8192, True, 0.0),
    ("llama3-405b", 16, 1, 128, 128, 8192, True, 0.0),
    ("qwen3-32b", 8, 1, 128, 128, 4096, True, 0.0),
    ("qwen3-30b-a3b", 32, 4, 128, 128, 4096, True, 0.0),
    ("deepseek-v3", 16, 16, 192, 128, 4096, True, 0.0),
    ("gemma's wide heads", 8, 4, 256, 256, 4096, True, 0.0),
    ("BERT, not causal", 12, 12, 64, 64, 512, False, 0.0),
    ("ViT's odd length", 12, 12, 64, 64, 197, False, 0.0),
    ("an odd width", 8, 8, 80, 80, 1024, True, 0.0),
)


def measure_kernels(call: tuple, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Torch's own choice beside the table's, and per kernel what it keeps beyond Q, K, V and its output.

    predicted_bytes: 4 bytes a query and head of log-sum-exp, with the table's extras.  Only for kernels that
    run the call.
    """
    _, heads, key_heads, width, value_width, tokens, causal, dropout = call
    name = str(dtype).removeprefix("torch.")
    described = AttentionCall(
        name, width, value_width, heads, key_heads, tokens, tokens, causal=causal, dropout=dropout
    )
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
            kept["predicted_bytes"] = 4 * heads * tokens + total(attention_rows(kernel, 1, heads, tokens))
        found["kernels"][kernel] = kept
    found["chosen"] = next((k for k, node in KERNEL_NODES.items() if found["chosen"].startswith(node)), "math")
    return found


def _run(call: tuple, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """One call: its autograd node, what it saved beyond Q, K, V and the output, what the allocator was asked for."""
    _, heads, key_heads, width, value_width, tokens, causal, dropout = call

    def made(count: int, size: int) -> torch.Tensor:
        return torch.randn(1, count, tokens, size, device=device, dtype=dtype, requires_grad=True)

    query, key, value = made(heads, width), made(key_heads, width), made(key_heads, value_width)
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        # Not the tensor itself: a node that saves its own output would hold itself for ever.
        return tensor.detach()

    before = _requested(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, enable_gqa=heads != key_heads
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

"""The layer of megatron-core 0.16, by its local specification, without Transformer Engine.

On a GPU nothing is changed but its layer norm, whose wrapper refuses sequence parallelism.
On a CPU the few calls that name CUDA are redirected; what they do on a GPU costs time there, so
leaving it out does not slow Megatron down here.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.layers.attention import causal_mask
from actmem.parallel.groups import TensorParallel
from actmem.recipes import Recompute
from actmem_course.peers import PeerUnavailable

#: Region of ours → the nearest that Megatron's ``recompute_modules`` drop.
RECOMPUTE_MODULES = {"core": ["core_attn"], "terms": ["core_attn", "layernorm", "mlp"]}
#: The process group for which Megatron's own groups were made.
_groups_made_for: object = None


def megatron_layer(
    shape: ModelShape,
    tp: TensorParallel,
    recompute: str | tuple[str, ...] = "none",
    *,
    p: float = 0.1,
    device: str = "cpu",
    dtype=torch.float32,
) -> nn.Module:
    """Megatron's TransformerLayer over all ranks, in the paper's arithmetic.

    In and out: ``[s/t, b, h]`` or ``[s, b, h]``.

    recompute: a mode of ours, or the names for its ``recompute_modules``.
    Softmax in the activations' dtype, as the paper counts; Megatron's default keeps a float32
    copy.  No fused kernels: they need a GPU.  Raises PeerUnavailable without megatron-core.
    """
    core = _megatron_core()
    _make_groups(core, device)
    region = "" if isinstance(recompute, tuple) else Recompute.of(recompute).region
    modules = list(recompute) if isinstance(recompute, tuple) else RECOMPUTE_MODULES.get(region)
    config = core.TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        ffn_hidden_size=4 * shape.hidden_size,
        attention_dropout=p,
        hidden_dropout=p,
        tensor_model_parallel_size=tp.size,
        sequence_parallel=tp.sequence_parallel,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        activation_func=partial(F.gelu, approximate="tanh"),
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=device == "cpu",
        recompute_granularity="selective" if modules else None,
        recompute_modules=modules or None,
    )
    spec = core.get_gpt_layer_local_spec(normalization="LayerNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _Norm
    spec.submodules.self_attention.params["attn_mask_type"] = core.AttnMaskType.causal
    layer = core.build_module(spec, config=config).to(device=device, dtype=dtype).train()
    if modules and "mlp" in modules:
        # Its checkpoint returns the MLP's bias as it is, which autograd then takes for a result of the checkpoint:
        # backward would run the MLP again without end.
        layer.mlp.register_forward_hook(lambda module, inputs, output: (output[0], output[1].clone()))
    checkpoint = core.random.checkpoint if region == "layer" else None
    return _Layer(layer, checkpoint, causal_mask(shape.seq_length, device))


class _Layer(nn.Module):
    """Megatron's layer with one tensor in and one out."""

    def __init__(self, layer: nn.Module, checkpoint, mask: Tensor):
        super().__init__()
        self.layer, self.checkpoint = layer, checkpoint
        self.register_buffer("mask", mask[None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x) if self.checkpoint is None else self.checkpoint(self._forward, False, x)

    def _forward(self, x: Tensor) -> Tensor:
        return self.layer(x, attention_mask=self.mask)[0]


class _Norm(nn.LayerNorm):
    """torch's layer norm with Megatron's arguments."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps, dtype=config.params_dtype)


class _Core:
    """The names of megatron-core that are used here."""

    def __init__(self):
        def module(name):
            return importlib.import_module(f"megatron.core.{name}")

        self.parallel_state, self.random = module("parallel_state"), module("tensor_parallel.random")
        self.TransformerConfig = module("transformer.transformer_config").TransformerConfig
        self.get_gpt_layer_local_spec = module("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec
        self.AttnMaskType = module("transformer.enums").AttnMaskType
        self.build_module = module("transformer.spec_utils").build_module
        names = (
            "tensor_parallel",
            "tensor_parallel.random",
            "tensor_parallel.layers",
            "transformer.dot_product_attention",
        )
        self.users_of_tracker = [module(name) for name in names]


def _megatron_core() -> _Core:
    try:
        return _Core()
    except ImportError as error:
        reason = f"megatron-core can't be imported: {error}"
        raise PeerUnavailable(f"{reason}; pip install -e '.[peers]'") from None


def _make_groups(core: _Core, device: str) -> None:
    """Make Megatron's process groups for the present world, once."""
    global _groups_made_for
    if _groups_made_for is dist.group.WORLD:
        return
    if core.parallel_state.model_parallel_is_initialized():
        core.parallel_state.destroy_model_parallel()
    core.parallel_state.initialize_model_parallel(dist.get_world_size(), create_gloo_process_groups=False)
    if device == "cpu":
        _redirect_to_cpu(core)
    else:
        core.random.model_parallel_cuda_manual_seed(1234)
    _without_transformer_engine(core)
    _groups_made_for = dist.group.WORLD


class _NoTracker:
    """In place of the tracker of CUDA's random-number states if there is no CUDA."""

    def fork(self, *_):
        return nullcontext()


class _NoFP8:
    """In place of Transformer Engine's FP8 state: ``layernorm`` in recompute_modules asks it even where FP8 is off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _without_transformer_engine(core: _Core) -> None:
    if not hasattr(core.random, "FP8GlobalStateManager"):
        core.random.FP8GlobalStateManager = _NoFP8
        core.random.activation_recompute_forward = core.random.fp8_autocast = lambda *_, **__: nullcontext()


def _redirect_to_cpu(core: _Core) -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]  # as megatron reads it
    for module in core.users_of_tracker:
        module.get_cuda_rng_tracker = lambda *_: _NoTracker()
    core.random._get_all_rng_states = lambda: (torch.get_rng_state(),)
    core.random._set_all_rng_states = lambda state: torch.set_rng_state(state)

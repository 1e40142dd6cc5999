"""The optimizers and precisions that a plan can choose.

An ``Optimizer`` says which states it keeps, what its step allocates, and how each framework calls it.  To add one, add
it to ``OPTIMIZERS``.  ``PRECISIONS`` has the dtypes in which weights and gradients are kept.
"""

from dataclasses import dataclass, replace

from actmem.config import check_choice
from actmem.formulas.states import ADAM, State

_WEIGHT_AND_GRADIENT = ADAM["16-bit gradients"][:2]
_HALVES = State("float32 weights' lower halves: by rule, not run", 2, "of TransformerEngine's Adam, from 2.1 on")
#: The values of ``plan --precision``, each with the states that are kept of every parameter beside the optimizer's own:
#: the weight, its gradient, and a float32 copy of the weight or the lower halves of one, if the precision has them.
PRECISIONS = {
    "mixed": ADAM["float32 gradients"][:3],
    "bf16-gradients": (*_WEIGHT_AND_GRADIENT, _HALVES),
    "bf16-states": (*_WEIGHT_AND_GRADIENT, _HALVES),
    "bf16": _WEIGHT_AND_GRADIENT,
    "fp8": ADAM["float32 gradients"][:3],  # the weights' copies come on top: ``actmem_more.fp8``
}
#: The precisions in which an optimizer's states have 16 bits, unless they have fewer.
NARROW_STATES = ("bf16-states", "bf16")


@dataclass(frozen=True)
class Optimizer:
    """An optimizer that a plan can have.

    Args:
        name: the optimizer's name for ``plan --optimizer``, such as "adamw".
        states: the optimizer's own states of each parameter, such as momentum: a ``State`` (name and bytes) each.
            Weight, gradient and a float32 copy of the weight are not among them.
        code: the PyTorch expression that makes the optimizer; "" if the code printed with a plan needs no line for it.
        trainer: arguments of transformers' TrainingArguments that choose the optimizer.
        megatron: flags of Megatron-LM that choose the optimizer, or a comment if Megatron-LM doesn't have it.
        copies_in_step: whether the optimizer's step allocates a temporary copy as large as the weights, as AdamW with
            ``foreach`` does.
        is_default: whether the optimizer is AdamW, the default of every framework.
    """

    name: str
    states: tuple[State, ...]
    code: str
    trainer: tuple[str, ...]
    megatron: tuple[str, ...] = ()
    copies_in_step: bool = False
    is_default: bool = False

    def all_states(self, precision: str) -> tuple[State, ...]:
        """List the states that training with this optimizer keeps for each parameter.

        Args:
            precision: "mixed", "bf16-gradients", "bf16-states", "bf16" or "fp8" (``PRECISIONS``).  In "bf16-states" and
                "bf16" the optimizer's float32 states shrink to 16 bits.

        Returns: a ``State`` (name and bytes) each, in this order: the weight; its gradient; a float32 copy of the
            weight or the lower halves of one, if the precision has them; and the optimizer's own states.
        """
        own = [*self.states]
        for place, state in enumerate(own):
            if precision in NARROW_STATES and state.bytes_per_parameter == 4:
                own[place] = replace(state, bytes_per_parameter=2, reason="16 bits")
        return *PRECISIONS[precision], *own


OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer(
            "adamw",
            states=ADAM["float32 gradients"][3:],
            code="",
            trainer=('optim="adamw_torch"',),
            copies_in_step=True,
            is_default=True,
        ),
        Optimizer(
            "adamw-fused",
            states=ADAM["float32 gradients"][3:],
            code="torch.optim.AdamW(model.parameters(), fused=True)",
            trainer=('optim="adamw_torch_fused"',),
            is_default=True,
        ),
        Optimizer(
            "adamw8bit",
            states=(
                State("Adam moments, 8-bit", 2, "a byte of each (2110.02861; torchao's AdamW8bit)"),
                State("scales of the moments", 8, "float32, of each for 256 parameters", parameters=256),
            ),
            # This library doesn't run it.  Its 8 bits are for weights of at least 4,096 elements; the bill has all so.
            code="torchao.optim.AdamW8bit(model.parameters())",
            trainer=('optim="adamw_torch_8bit"',),
            megatron=("# it has no 8-bit Adam: with --use-precision-aware-optimizer its moments have 2 bytes or fp8",),
        ),
        Optimizer(
            "momentum",
            states=(State("momentum", 4, "running sum of the gradient, float32"),),
            code="torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
            trainer=('optim="sgd"', 'optim_args="momentum=0.9"'),
            megatron=("--optimizer sgd",),
        ),
        Optimizer(
            "sgd",
            states=(),
            code="torch.optim.SGD(model.parameters(), lr=0.1)",
            trainer=('optim="sgd"',),
            megatron=("--optimizer sgd", "--sgd-momentum 0.0"),
        ),
    )
}


def optimizer_of(name: str) -> Optimizer:
    """Return the entry of ``OPTIMIZERS`` with this name, such as "adamw".

    Raises: ConfigError if there is none.
    """
    check_choice("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]

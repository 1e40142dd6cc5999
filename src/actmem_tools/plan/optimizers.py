"""The optimizers that a plan can bill: their bytes, what their step makes, and how each framework names them.

To add one, add it here.
"""

from __future__ import annotations

from dataclasses import dataclass

from actmem.config import check_choice
from actmem.formulas.states import ADAM, State


@dataclass(frozen=True)
class Optimizer:
    """One optimizer.

    Args:
        name: as ``plan --optimizer`` takes it.
        states: what it keeps beside the weights, the gradients and a float32 copy of the weights.
        code: what makes it in PyTorch; "" for the default of the printed code.
        trainer: its name in transformers' TrainingArguments, and what its arguments must be.
        megatron: its flags in Megatron-LM.
        copies_in_step: whether its step, with ``foreach``, makes as many bytes as the weights it trains.
        is_default: whether every framework trains with it unasked.
    """

    name: str
    states: tuple[State, ...]
    code: str
    trainer: tuple[str, ...]
    megatron: tuple[str, ...] = ()
    copies_in_step: bool = False
    is_default: bool = False

    @property
    def all_states(self) -> tuple[State, ...]:
        """What mixed precision with float32 gradients keeps of every parameter."""
        return (*ADAM["float32 gradients"][:3], *self.states)


OPTIMIZERS = {
    one.name: one
    for one in (
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
            # It isn't run here: weights below 4,096 elements keep whole states.
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
    """The optimizer of that name.  Raises ConfigError on another name."""
    check_choice("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]

"""Count the collectives that a rank takes part in, with their kinds and bytes.

They are counted at torch's dispatcher, below every Python interface: calls of ``torch.distributed``, functional
collectives and those of DTensor, in forward and in backward.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from actmem.torch_private import DispatchMode, tree_leaves


@dataclass(frozen=True)
class Collective:
    """One collective that ran, as ``count_collectives`` saw it.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send" and so on.
        payload_bytes: bytes of the unsharded tensor: the input of an all-reduce or a reduce-scatter, the output of an
            all-gather.
    """

    kind: str
    payload_bytes: int


_OPERATORS = {
    "all-reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_",
    "all-gather": "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_ "
    "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
    "reduce-scatter": "reduce_scatter reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ "
    "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
    "broadcast": "broadcast_ broadcast",
    "reduce": "reduce_",
    "gather": "gather_",
    "scatter": "scatter_",
    "all-to-all": "alltoall_ alltoall_base_ all_to_all_single shard_dim_alltoall",
    "send": "send isend",
    "receive": "recv_ recv_any_source_ irecv",
    "barrier": "barrier monitored_barrier_",
}
#: Operator name → kind of collective, in both of torch's spellings (``c10d`` and functional).  Operators that only wait
#: or exchange metadata are not listed.
KIND_OF_NAME = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}
#: The last is our own, for gloo (``parallel.collectives``).
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor", "actmem")


@cache
def kind_of(operator: Any) -> str:
    """Return the kind of collective that an operator of torch's dispatcher runs, such as "all-reduce"; "" for none."""
    namespace, _, name = operator.name().split(".")[0].partition("::")
    return KIND_OF_NAME.get(name, "") if namespace in _NAMESPACES else ""


def whole_bytes(*values: Any) -> int:
    """Return the bytes of a collective's unsharded tensor: the largest of ``values``.

    Args:
        values: the collective's arguments and its result. A list of tensors counts as one value.
    """
    tensors = ([t for t in tree_leaves(value) if isinstance(t, Tensor)] for value in values)
    return max(sum(t.numel() * t.element_size() for t in some) for some in tensors)


class count_collectives(DispatchMode):
    """Count the collectives that this rank runs in a block: ``with count_collectives() as seen: …``.

    Attributes:
        collectives: a Collective for each, in the order in which they ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    @property
    def counts(self) -> Counter[str]:
        """Number of collectives of each kind."""
        return Counter(collective.kind for collective in self.collectives)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if kind := kind_of(func):
            self.collectives.append(Collective(kind, whole_bytes(*args, *(kwargs or {}).values(), result)))
        return result

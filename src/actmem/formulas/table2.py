"""Table 2: the six configurations, in the one list that everything else uses."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.checks import checked
from actmem.config import ModelShape, Parallel, check_layer
from actmem.formulas.activations import eq1, eq2, eq4


@dataclass(frozen=True)
class Configuration:
    """One row of 2205.05198 table 2.

    name: as written in JSON.  tensor_parallel: False for the row without any parallelism.
    template: the formula, with placeholders for the coefficients that depend on the element size.
    """

    name: str
    tensor_parallel: bool
    sequence_parallel: bool
    recompute: str
    template: str

    @checked
    def formula(self, element_size: int = 2) -> str:
        """Bytes divided by sbh; for 16-bit elements, as the paper prints it."""
        e = element_size
        return self.template.format(all=16 * e + 2, whole=4 * e + 2, cut=12 * e, core=2 * e + 1, input=e)

    @checked
    def parallel(self, tensor_parallel_size: int) -> Parallel:
        """How t ranks share the layer in this row; in the first row one rank has all of it."""
        t = tensor_parallel_size if self.tensor_parallel else 1
        return Parallel(tensor_parallel_size=t, sequence_parallel=self.sequence_parallel)


TABLE2 = (
    Configuration("none", False, False, "none", "{all} + {core}as/h"),
    Configuration("tensor", True, False, "none", "{whole} + {cut}/t + {core}as/ht"),
    Configuration("tensor+sequence", True, True, "none", "{all}/t + {core}as/ht"),
    Configuration("tensor+selective", True, False, "selective", "{whole} + {cut}/t"),
    Configuration("tensor+sequence+selective", True, True, "selective", "{all}/t"),
    Configuration("full", True, False, "full", "{input}"),
)


@checked
def closed_form(
    configuration: Configuration, shape: ModelShape, tensor_parallel_size: int, element_size: int = 2
) -> int:
    """Bytes of one layer on one rank from the row's own formula, not from a sum of tensors."""
    check_layer(shape, configuration.parallel(tensor_parallel_size))
    a, b, h, s = shape.letters()
    e, t = element_size, tensor_parallel_size
    core = (2 * e + 1) * a * s * s * b // t
    return {
        "none": lambda: eq1(shape, e),
        "tensor": lambda: eq2(shape, t, e),
        "tensor+sequence": lambda: eq4(shape, t, e),
        "tensor+selective": lambda: eq2(shape, t, e) - core,
        "tensor+sequence+selective": lambda: (16 * e + 2) * s * b * h // t,
        "full": lambda: e * s * b * h,
    }[configuration.name]()

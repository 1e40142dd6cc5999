"""What ranks exchange, and whether the sharded layer computes what the unsharded one does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParityResult:
    """One form on one rank, against the unsharded layer with the same weights and input.

    largest_error: over the output, the input's gradient and every parameter's.  forward, backward:
    exchanges of each kind.  partial_gradients: parameters whose gradient was not the dense
    layer's before ``reduce_partial_gradients``.
    """

    form: str
    tensor_parallel_size: int
    rank: int
    largest_error: float
    exact: bool
    forward: dict[str, int]
    backward: dict[str, int]
    partial_gradients: list[str]


@dataclass(frozen=True)
class ExchangeCount:
    """Exchanges of one layer, forward and backward, on this rank: by formula, and counted.

    predicted, measured: how many of each kind.  Bytes are of all together: the tensors' own, and
    what a ring sends for them.
    """

    name: str
    recompute: str
    predicted: dict[str, int]
    measured: dict[str, int]
    predicted_payload_bytes: int
    measured_payload_bytes: int
    predicted_wire_bytes: int
    measured_wire_bytes: int

    @property
    def exact(self) -> bool:
        return (self.predicted, self.predicted_payload_bytes, self.predicted_wire_bytes) == (
            self.measured,
            self.measured_payload_bytes,
            self.measured_wire_bytes,
        )

    @property
    def difference(self) -> str:
        """What does not agree, in words."""
        return f"{self.name}, {self.recompute}: by formula {self.predicted}, counted {self.measured}"


@dataclass(frozen=True)
class SocketCount:
    """Bytes that all ranks together sent.

    predicted_bytes: data, as around a ring.  header_bytes: what gloo adds, predicted too.
    sent_bytes: what the sockets say.
    """

    name: str
    predicted_bytes: int
    header_bytes: int
    sent_bytes: int

    @property
    def exact(self) -> bool:
        return self.sent_bytes == self.predicted_bytes + self.header_bytes

    @property
    def difference(self) -> str:
        """What does not agree, in words."""
        return f"{self.name}: {self.predicted_bytes:,} + {self.header_bytes:,} bytes by formula, {self.sent_bytes:,} on the sockets"

"""Record the stages of this library's models: one layer, and the two ends around a hole where the layers are.

``stage_tapes`` puts a stage of any number of layers together from the two, without torch.
``python -m tests.tape.stages`` records all that the planner's named models need (``make tapes``).
"""

import json
import multiprocessing
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from actmem.config import ModelShape, Parallel
from actmem.layers.gpt import GPT
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.measure_layer import layer_input
from actmem.main_grad import use_main_gradients
from actmem_more.context import layer_groups
from actmem_more.experts import Routing, expert_ranks
from actmem_more.llama import LlamaStage
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import forced_routed_tokens
from actmem_tools.tape.evaluate import BACKWARD, Event, Free, Make, Mark, Resize, Run, Tape, added, packed
from actmem_tools.tape.record import GENERATOR_STATE, Recorder, record_step
from actmem_tools.tape.solver import Rules, Runs, solve
from actmem_tools.tape.stage_tapes import FILE, LAYERS

#: a, k, f and v are those of one rank; s is the rank's part among c, before sequence parallelism cuts it.
GPT_LETTERS, GPT_RULES = ("s", "b", "a", "d", "v", "t"), {"s": (4, ("t",)), "d": (2, ())}
STAGE_LETTERS = ("s", "b", "h", "a", "k", "d", "f", "v", "t", "c")
#: Of a rank: its experts, those of a token, and the pairs of both that it takes.
EXPERT_LETTERS = (*STAGE_LETTERS, "n", "x", "r")
LETTER_RULES: Rules = {"s": (4, ("t",)), "a": (1, ("k",)), "d": (2, ())}
STAGE_KINDS = {"first": (True, False), "last": (False, True), "whole": (True, True)}
#: What the tensor-parallel ranks share, by the words in a tape's name.
SHARED = {"alone": False, "tensor": False, "sequence": True}
_MARKS = Mark(BACKWARD), Mark(LAYERS)


class _Layers(Function):
    """In place of all layers: its output and its input's gradient are new tensors."""

    @staticmethod
    def forward(ctx, x: Tensor, sent: Tensor, shape: tuple[int, ...] | None, recorder: Recorder) -> Tensor:
        ctx.recorder, ctx.given = recorder, x.shape
        return sent.detach() if shape is None else torch.empty(shape, dtype=sent.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        ctx.recorder.mark(LAYERS)
        if not ctx.given:
            return None, None, None, None
        grad = torch.empty(ctx.given, dtype=grads[0].dtype)
        # A stage's caller can hold this one; where nobody does, the peak isn't where others are added to it.
        ctx.recorder.held.add(grad.untyped_storage())
        return grad, None, None, None


class Hole(nn.Module):
    """Where the layers are, or the next stage is.  shape: of what comes out; None where it is sent on, and nothing does."""

    recorder: Recorder

    def __init__(self, shape: tuple[int, ...] | None = None):
        super().__init__()
        self.shape = shape
        self.register_buffer("sent", torch.zeros((), dtype=torch.bfloat16), persistent=False)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        y = _Layers.apply(x, self.sent, self.shape, self.recorder)
        if x.dim():  # what comes in belongs to what comes next
            x.untyped_storage().resize_(0)
            self.recorder.resized(x)
        return y


class OneLayer(nn.Module):
    """A layer, and after it the next."""

    def __init__(self, layer: nn.Module, *constants: Tensor):
        super().__init__()
        self.layer, self.hole, self.constants = layer, Hole(), constants
        for i, tensor in enumerate(constants):
            self.register_buffer(f"constant{i}", tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.hole(self.layer(x, *self.constants))


def recorded(
    part: nn.Module, hole: Hole, arrives: Callable[[], Tensor], loss: Callable[[Tensor], Tensor]
) -> list[Event]:
    """The events of a layer or of two ends, with main gradients."""
    use_main_gradients(part)
    start = torch.ones((), dtype=torch.bfloat16)

    def forward(recorder: Recorder) -> Tensor:
        hole.recorder = recorder
        return loss(part(arrives()))

    def backward(y: Tensor, recorder: Recorder) -> None:
        y.backward(start if y.dtype is start.dtype else None)

    events = record_step(part, forward, backward, start)
    # A GPU's states of generators are smaller than a CPU's: the rows of what is kept count them, and tapes don't.
    states = {e.number for e in events if isinstance(e, Make) and e.name == GENERATOR_STATE}
    events = [e for e in events if getattr(e, "number", None) not in states]
    return folded([Run(e.op, e.where, e.flops, (), ()) if isinstance(e, Run) else e for e in events])


def folded(events: list[Event]) -> list[Event]:
    """With each loop over experts as one operation: tensors of one name, made one after another and freed together."""
    place = {e.number: i for i, e in enumerate(events) if isinstance(e, Free)}
    result: list[Event] = []
    into: dict[int, int] = {}
    for i, event in enumerate(events):
        last = next((j for j in range(len(result) - 1, -1, -1) if not isinstance(result[j], Run)), -1)
        if isinstance(event, Make) and last >= 0 and isinstance(before := result[last], Make):
            apart = abs(place.get(event.number, -1) - place.get(event.number - 1, -9))
            if before.name == event.name and apart == 1 and len(result) - last == 2:
                result[last] = Make(before.number, before.bytes + event.bytes, before.name)
                into[event.number] = before.number
                continue
        if isinstance(event, Free) and event.number in into:
            continue
        if isinstance(event, Run) and isinstance(result[-1], Run) and isinstance(events[i - 1], Make) and events[i - 1].number in into:  # type: ignore[union-attr] # fmt: skip
            run = result.pop()
            assert isinstance(run, Run)
            event = Run(run.op, run.where, run.flops + event.flops, (), ())
        result.append(event)
    numbers = {e.number: i for i, e in enumerate(e for e in result if isinstance(e, Make))}
    return [replace(e, number=numbers[e.number]) if isinstance(e, (Make, Free, Resize)) else e for e in result]


def as_on_gpus(events: list[Event]) -> list[Event]:
    """What CUDA's kernels make: layer norm's statistics in float32, and no numbers beside a dropout mask."""
    result: list[Event] = []
    numbers: set[int] = set()
    for event in events:
        if isinstance(event, Run) and event.op == "random_":
            made = next(e for e in reversed(result) if isinstance(e, Make))
            numbers.add(made.number)
            result.remove(made)
        if isinstance(event, Run) and event.op == "native_layer_norm":
            for i, e in enumerate(result[-2:], len(result) - 2):
                assert isinstance(e, Make)
                result[i] = Make(e.number, 2 * e.bytes, e.name)
        if not (isinstance(event, Free) and event.number in numbers):
            result.append(event)
    return result


def gpt_events(name: str, sizes: Mapping[str, int]) -> list[Event]:
    """The events of a part of the paper's GPT: "layer MODE SHARED" or "KIND SHARED" (``STAGE_KINDS``, ``SHARED``)."""
    what, *more = name.split()
    s, b, a, d, v, t = (sizes[x] for x in GPT_LETTERS)
    if more[-1] == "alone":
        t = 1
    first, last = STAGE_KINDS.get(what, (False, False))
    shape = ModelShape(s, b, a * t * d, a * t, num_layers=1 + (first != last), vocab_size=v * t)
    own = s // t if SHARED[more[-1]] else s
    with emulated_rank(t, real_tensors=True):
        tp, _ = layer_groups(1, sequence_parallel=SHARED[more[-1]])
        options: dict = {"dtype": torch.bfloat16, "recompute": more[0] if what == "layer" else "none"}
        layers = range(1) if what == "layer" or first else range(1, 2)
        model = GPT(shape if what != "layer" else shape.with_sizes(num_layers=3), tp, layers=layers, **options)
        if what == "layer":
            return layer_events(model, OneLayer(model.layers["0"], model.get_buffer("mask")))
        model.layers = nn.ModuleDict({"0": Hole((own, b, shape.hidden_size) if last else None)})
        return ends_events(model, model.layers["0"])


def layer_events(stage: GPT | LlamaStage, part: OneLayer) -> list[Event]:
    """The events of one of the stage's layers."""
    return recorded(part, part.hole, lambda: layer_input(stage.shape, stage.tp, "cpu", torch.bfloat16), lambda y: y)


def ends_events(stage: GPT | LlamaStage, hole: Any) -> list[Event]:
    """The events of the stage's ends around the hole that its layers were replaced by."""
    sizes = stage.shape.micro_batch_size, stage.shape.seq_length
    ids = lambda: torch.randint(0, stage.shape.vocab_size, sizes)  # noqa: E731
    anchor = torch.zeros((), dtype=torch.bfloat16, requires_grad=True)
    arrives = ids if stage.is_first else lambda: anchor
    return recorded(stage, hole, arrives, lambda y: stage.loss(y, ids()) if stage.is_last else y)


def llama_events(name: str, sizes: dict[str, int]) -> list[Event]:
    """The events of a part of today's decoder: "layer MODE SHARED [context] [qk] [experts [beside]]" or "KIND SHARED".

    Of experts it sets r, and routes one-sidedly for some of the r that are drawn.  "beside": w times t ranks share them.
    """
    what, *more = name.split()
    s, b, h, a, k, d, f, v, t, c = (sizes[x] for x in STAGE_LETTERS)
    shared = more[1] if what == "layer" else more[0]
    t = 1 if shared == "alone" else t
    c = c if "context" in more else 1
    first, last = STAGE_KINDS.get(what, (False, False))
    experts: dict = {}
    routing: Routing = "even"
    beside = sizes["w"] if "beside" in more else 1
    if "experts" in more:
        experts = {"num_experts": sizes["n"] * t * beside, "experts_per_token": sizes["x"]}
        routing = "one-sided" if sizes["r"] in (7, 19) else "even"
    shape = LlamaShape(s * c, b, h, a * t, k * t, f if experts else f * t, d, "qk" in more, **experts)
    own = s // t if SHARED[shared] else s
    if experts:
        parallel = Parallel(t, SHARED[shared], expert_parallel_size=t * beside)
        sizes["r"] = forced_routed_tokens(shape.with_sizes(seq_length=s), parallel, routing, 0)
    with emulated_rank(t * c * beside, real_tensors=True):
        tp, context = layer_groups(c, sequence_parallel=SHARED[shared], replicas=beside)
        mode = more[0] if what == "layer" else "none"
        layers = range(1, 2) if what == "layer" else range(1) if first else range(1, 2)
        options: dict = {"recompute": mode, "routing": routing, "context": context, "dtype": torch.bfloat16}
        options["experts"] = expert_ranks(t * beside) if beside > 1 else None
        whole = shape.with_sizes(num_layers=3 if what == "layer" else 1 + (first != last), vocab_size=v * t)
        stage = LlamaStage(whole, tp, layers=layers, **options)
        if what == "layer":
            return layer_events(stage, OneLayer(stage.layers[0]))
        stage.layers = nn.ModuleList([Hole((own, b, h) if last else None)])
        return ends_events(stage, stage.layers[0])


#: Names of parts, what records them, their letters and rules, by the kind of model.
def families_to_record() -> dict[str, tuple[list[str], Callable, tuple[str, ...], Rules]]:
    gpt_modes, modes = ("none", "selective", "elementwise", "full"), ("none", "elementwise", "full")
    ends = [f"{kind} {shared}" for kind in STAGE_KINDS for shared in SHARED]
    gpt = [f"layer {mode} {shared}" for mode in gpt_modes for shared in SHARED]
    layers = [f"layer {mode} {shared}{context}" for mode in modes for shared in SHARED for context in ("", " context")]
    llama = [f"{layer}{qk}" for layer in layers for qk in ("", " qk")]
    experts = [f"{layer} experts" for layer in llama]
    beside = [f"{layer} beside" for layer in experts if " tensor" not in layer]
    return {
        "gpt": (ends + gpt, gpt_events, GPT_LETTERS, GPT_RULES),
        "llama": (ends + llama, llama_events, STAGE_LETTERS, LETTER_RULES),
        "experts": (experts, llama_events, EXPERT_LETTERS, LETTER_RULES),
        "beside": (beside, llama_events, (*EXPERT_LETTERS, "w"), LETTER_RULES),
    }


def totals(tape: Tape) -> Tape:
    """The tape with the FLOPs of each pass as one event at its end, in place of all that runs."""
    formulas = list(tape.formulas)
    variants: dict[tuple[str, ...], list[Event]] = {}
    for ones, events in tape.variants.items():
        begins = events.index(Mark(BACKWARD))
        variants[ones] = []
        for some in (events[:begins], events[begins:]):
            variants[ones] += [event for event in some if event in _MARKS or isinstance(event, (Make, Free, Resize))]
            variants[ones].append(Run("products", "", len(formulas), (), ()))
            formulas.append(added(tape.formulas[event.flops] for event in some if isinstance(event, Run)))
    return Tape(tape.letters, formulas, variants)


def record_tape(family: str, name: str, device: str) -> Tape:
    """One tape of a kind of model; device: "" or " cuda"."""
    _, events, letters, rules = families_to_record()[family]
    seen = as_on_gpus if device else list
    return totals(solve(lambda sizes: seen(events(name, sizes)), Runs(letters, rules, may_be_one=("b", "k"))))


def record_family(family: str, pool: Executor) -> dict:
    """All tapes of a kind of model, as the file has them."""
    devices = ("", " cuda") if family == "gpt" else ("",)
    wanted = [(family, name, device) for name in families_to_record()[family][0] for device in devices]
    tapes: dict[str, Tape] = {}
    for (_, name, device), tape in zip(wanted, pool.map(record_tape, *zip(*wanted))):
        tapes[f"{name}{device}"] = tape
        print(f"{family}: {name}{device}", len(tape.variants[()]), [*tape.variants], flush=True)
    return packed(tapes)


def main() -> int:
    """Record everything and write the file."""
    found = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() and sys.argv[1:] else {}
    # Each process of its own: a rank is emulated by the process's default group.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for family in sys.argv[1:] or families_to_record():
            found[family] = record_family(family, pool)
    FILE.write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

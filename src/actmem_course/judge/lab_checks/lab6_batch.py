"""Lab 6's training data: pieces of text, the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench


def check_batch(b: Bench) -> None:
    s, size = 9, 4
    # Every token occurs once, so that a piece's place in the text is known, and neighbours are no neighbours as numbers.
    text = torch.stack((torch.arange(200), torch.arange(200) + 1000), 1).flatten().to(b.device)
    batches = [_windows(b, text, step, s, size) for step in (0, 1, 0)]
    tokens, targets = batches[0]
    if torch.equal(targets, tokens):
        raise Wrong("targets are the tokens themselves: at each position the target is the next token")
    if torch.equal(targets[:, 1:], tokens[:, :-1]):
        raise Wrong("targets are shifted the wrong way: they are the previous tokens, and must be the next ones")
    _check_pieces(text, tokens, targets)
    # First of all other comparisons: ranks that draw by themselves differ in each of them.
    if not all(torch.equal(tokens.cpu(), other) for other in b.gather(tokens.cpu())):
        raise Wrong(
            "ranks have different batches: a tensor-parallel group shares one model and works on one batch; "
            "different data for each rank is data parallelism"
        )
    if not torch.equal(tokens, batches[2][0]):
        raise Wrong(
            "the same step gives another batch the second time: choose the pieces by step alone, or runs cannot be compared"
        )
    if torch.equal(tokens, batches[1][0]):
        raise Wrong("steps 0 and 1 have the same batch: choose different pieces each step")
    if len({tuple(row.tolist()) for row in tokens}) < size:
        raise Wrong("rows of one batch are equal: choose a different piece for each")
    later = [tokens, *(_windows(b, text, step, s, size)[0] for step in range(1, 7))]
    for i, one in enumerate(later):
        for j in range(i):
            if torch.equal(one, later[j]):
                raise Wrong(f"steps {j} and {i} have the same batch: choose different pieces each step")
    for length in (s + size, 2 * s, 2 * s + 1):
        _check_the_end(b, s, size, length)


def _check_pieces(text: Tensor, tokens: Tensor, targets: Tensor) -> None:
    """Raise Wrong unless each row is a piece of text, and its targets the piece one token further on."""
    size, s = tokens.shape
    for row in range(size):
        start = (text == tokens[row, 0]).nonzero()
        if len(start) != 1 or not torch.equal(text[start[0, 0] : start[0, 0] + s], tokens[row]):
            raise Wrong(f"row {row} of tokens is not a piece of text: expected {s} consecutive tokens")
        end = start[0, 0] + 1
        right, found = text[end : end + s], targets[row]
        if torch.equal(right, found):
            continue
        at = (text == found[0]).nonzero()
        if len(at) and torch.equal(text[at[0, 0] : at[0, 0] + s], found):
            ahead = int(at[0, 0] - start[0, 0])
            raise Wrong(f"row {row} of targets is {ahead} tokens ahead of tokens; the next token is 1 ahead")
        if torch.equal(right[:-1], found[:-1]):
            raise Wrong(
                "only the last target of a row is wrong: it is the token after the piece, so cut seq_length + 1"
            )
        raise Wrong(f"row {row} of targets is not the piece of text one token further on")


def _check_the_end(b: Bench, s: int, size: int, length: int) -> None:
    """A text with room for few pieces: whoever runs over its end does so here."""
    text = torch.arange(length, device=b.device)
    case = f"a text of {len(text)} tokens: "
    over = f"{case}a piece runs over its end; the last one starts at len(text) - seq_length - 1"
    for step in range(20):
        try:
            tokens, targets = _windows(b, text, step, s, size, case)
        except (IndexError, RuntimeError) as error:
            raise Wrong(f"{over} ({type(error).__name__})") from None
        if not torch.equal(targets, tokens + 1):
            raise Wrong(over)


def _windows(b: Bench, text: Tensor, step: int, s: int, size: int, case: str = "") -> tuple[Tensor, Tensor]:
    # Another state of the default generator on every rank and at every call: what draws from it shows.
    torch.manual_seed(7919 * b.rank + int(torch.randint(10**6, ())))
    with b.watching():
        result = b["batch"](text, step, s, size)
    if (
        not isinstance(result, (tuple, list))
        or len(result) != 2
        or not all(isinstance(part, Tensor) for part in result)
    ):
        raise Wrong("expected two tensors, tokens and targets" + (": is a return missing?" if result is None else ""))
    for name, part in zip(("tokens", "targets"), result):
        if part.shape != (size, s):
            raise Wrong(f"{case}{name} has shape {list(part.shape)}; expected {[size, s]}: [batch_size, seq_length]")
        if part.dtype != text.dtype:
            raise Wrong(f"{name} has dtype {part.dtype}; expected {text.dtype}, as in text")
    return result[0], result[1]

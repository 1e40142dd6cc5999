"""The bytes alive at the peak of output layer and cross entropy, forward and backward, on one rank.

With a large vocabulary and recomputed layers they are the largest tensors of a step, v numbers a token: see chapter 10.
"""

from actmem.config import check_choice, check_sizes, check_vocab_size
from actmem.rows import Row, total

#: Ways to compute the loss, from the most bytes to the fewest, with what each does.
LOSSES = {
    "float32": "F.cross_entropy of logits that are widened to float32, as Hugging Face's models do",
    "16 bits": "F.cross_entropy of the 16-bit logits as they are",
    "in place": "one float32 copy that becomes the softmax in place; the vocabulary shared among the ranks",
    "in chunks": "the logits of a chunk of tokens at a time, made again in backward; the vocabulary shared",
}


def loss_peak_rows(
    loss: str,
    tokens: int,
    hidden_size: int,
    vocab_size: int,
    tensor_parallel_size: int = 1,
    chunk: int = 1024,
) -> list[Row]:
    """List the tensors of output layer and loss that are alive when they take the most memory, forward and backward.

    Activations have 16 bits. The output layer's weight isn't listed. The weight's gradient is listed if it is alive at
    the peak. With "in chunks" it always is, as a float32 sum. With all other ways it is made after the loss's tensors
    are freed; so the peak lies either at the loss or, if the gradient takes more, at the gradient.

    Args:
        loss: how the loss is computed: "float32" and "16 bits" compute all logits on each rank; "in place" shards the
            vocabulary and makes one float32 copy of the logits, which becomes the softmax; "in chunks" shards the
            vocabulary too and has the logits of ``chunk`` tokens at a time.
        tokens: s·b, the tokens of one microbatch.
        hidden_size: h, elements of one token's activation.
        vocab_size: v, words of the vocabulary; t must divide it.
        tensor_parallel_size: t, the ranks among which "in place" and "in chunks" shard the vocabulary.
        chunk: with "in chunks", for how many tokens logits exist at once; all other ways ignore it.

    Raises: ConfigError on another loss, or if t does not divide the vocabulary.
    Source: 2205.05198 section 4.3 for float32 logits; counted by ``actmem.ledger.watch_step``.
    """
    check_choice("loss", loss, LOSSES)
    check_sizes(tokens=tokens, hidden_size=hidden_size, chunk=chunk)
    t, h, rows = tensor_parallel_size, hidden_size, check_vocab_size(vocab_size, tensor_parallel_size)
    x = Row("output layer input", 2 * tokens * h, source="§4.3, output layer")
    grad_x = Row("gradient of the output layer input", x.bytes, source="output layer, backward")
    if loss == "in chunks":
        c = min(chunk, tokens)
        moments = [
            (Row("a chunk's logits", 6 * c * rows, t, "made again, and rounded to 16 bits"),),
            (
                Row("a chunk's logits", 2 * c * rows, t, "their gradient, in 16 bits"),
                Row("a chunk's part of the weight's gradient", 2 * rows * h, t, "backward"),
            ),
        ]
        return [
            x,
            grad_x,
            Row("gradient of the weight", 4 * rows * h, t, "backward, a float32 sum"),
            *max(moments, key=total),
            Row("numbers a token", 24 * tokens + 9 * c + 8, source="ids, sums, losses and their gradients"),
        ]
    size = 2 if loss == "16 bits" else 4
    at_the_loss: tuple[Row, ...]
    if loss == "in place":
        # The ids and their copy, the mask of those that are this rank's, and the sums are alive at the end of forward.
        at_the_loss = (
            Row("logits", 2 * tokens * rows, t, "output layer"),
            Row("softmax", 4 * tokens * rows, t, "§4.3, cross entropy"),
            Row("numbers a token", 38 * tokens + 8 if t == 1 else 41 * tokens, source="ids, sums, losses"),
        )
    else:
        t, rows = 1, vocab_size
        at_the_loss = (
            Row("softmax", size * tokens * rows, t, "cross entropy, its logarithm"),
            Row("gradient of the softmax", size * tokens * rows, t, "cross entropy, backward, of its logarithm"),
            Row("gradient of the logits", size * tokens * rows, t, "log-softmax, backward"),
            Row("numbers a token", 8 * tokens + 2 * size, source="ids; the loss and its gradient"),
        )
    # With few tokens the weight's gradient is larger than the softmax, which has been freed by then.
    at_the_linear = (
        grad_x,
        Row("gradient of the logits", 2 * tokens * rows, t, "log-softmax, backward"),
        Row("gradient of the weight", 2 * rows * h, t, "output layer, backward"),
        Row("numbers a token", 8 * tokens + 2 * size, source="ids; the loss and its gradient"),
    )
    return [x, *max((at_the_loss, at_the_linear), key=total)]

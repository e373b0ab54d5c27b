"""The tables of docs/explanation/kernels.md: what the kernels take at best."""

import functools

from benchmarks.rooflines import hopper
from benchmarks.rooflines.tpu import (
    decode_row,
    next_token_row,
    of_attention,
    of_decode_attention,
    of_token_logprob,
    row,
    table,
)
from jaxrl_post.kernels.attention.shapes import SHAPES as ATTENTION
from jaxrl_post.kernels.decode_attention.shapes import SHAPES as DECODE
from jaxrl_post.kernels.next_token.shapes import SHAPES as NEXT_TOKEN
from jaxrl_post.kernels.token_logprob.shapes import SHAPES as TOKEN_LOGPROB

__all__ = ["main"]


def main() -> None:
    """Prints the tables."""
    print(
        table(
            "token_logprob: forward + hidden + weight",
            [
                row(name, lambda _, sizes=shape[:3]: of_token_logprob(*sizes))
                for name, shape in TOKEN_LOGPROB.items()
                if not shape.kept
            ],
        )
    )
    print("## token_logprob on an H100: forward + gradient of logits + products\n")
    print("| shape | ms | busy | needed |\n|---|---|---|---|")
    for name, shape in TOKEN_LOGPROB.items():
        if not shape.kept:
            print(hopper.head_row(name, *shape[:3]))
    print()
    for title, tokens in (("one sequence a row", None), ("sequences of 1,024", 1024)):
        print(
            table(
                f"attention, {title}: forward + query + key",
                [
                    row(
                        name,
                        functools.partial(of_attention, shape, tokens or shape.length),
                    )
                    for name, shape in ATTENTION.items()
                ],
            )
        )
    for title, tokens in (("one sequence a row", None), ("sequences of 1,024", 1024)):
        print(f"## attention on an H100, {title}: forward + query + key\n")
        print("| shape | ms | busy | needed | bound by | idle | KiB |")
        print(7 * "|---" + "|")
        for name, shape in ATTENTION.items():
            print(hopper.attention_row(name, shape, tokens or shape.length))
        print()
    print(
        table(
            "decode_attention: own keys + shared keys",
            [
                decode_row(name, list(of_decode_attention(shape)))
                for name, shape in DECODE.items()
            ],
            ("us", "bandwidth"),
        )
    )
    print(
        table(
            "next_token: statistics + logits computed again",
            [next_token_row(name, *shape[:3]) for name, shape in NEXT_TOKEN.items()],
            ("us", "XLA"),
        )
    )
    print("## next_token on an H100: statistics + logits computed again\n")
    print("| shape | us | XLA |\n|---|---|---|")
    for name, shape in NEXT_TOKEN.items():
        if shape.vocab % 8 == 0:
            print(hopper.next_token_row(name, *shape[:3]))
    print()
    print("## decode_attention on an H100: own keys + shared keys\n")
    print("| shape | us | bandwidth | KiB |\n|---|---|---|---|")
    for name, shape in DECODE.items():
        print(hopper.decode_row(name, shape))

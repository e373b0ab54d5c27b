"""Cases of `benchmarks.kernels`: operations, shapes, arrays and implementations.

"reference" is XLA's program with all scores or logits in memory. Peers compute what
they can: one causal sequence a row, without shared prompts. Interpreted, kernels for
GPUs run on any device, at a shape that is small enough for it ("tiny").
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator.errors import drawn_errors, relative_errors
from jaxrl_post.data.packing import Sequence, Tree, pack
from jaxrl_post.kernels.attention import Scoring, Sight, attention
from jaxrl_post.kernels.attention.shapes import SHAPES as ATTENTION
from jaxrl_post.kernels.attention.shapes import Shape as AttentionShape
from jaxrl_post.kernels.decode_attention import OwnKeys, SharedKeys, decode_attention
from jaxrl_post.kernels.decode_attention.quantized import quantize_entries
from jaxrl_post.kernels.decode_attention.shapes import SHAPES as DECODE
from jaxrl_post.kernels.decode_attention.shapes import Shape as DecodeShape
from jaxrl_post.kernels.dispatch import platform
from jaxrl_post.kernels.next_token import next_token
from jaxrl_post.kernels.next_token.shapes import SHAPES as NEXT_TOKEN
from jaxrl_post.kernels.next_token.shapes import Shape as NextShape
from jaxrl_post.kernels.token_logprob import Scaling, token_logprob
from jaxrl_post.kernels.token_logprob.shapes import SHAPES as TOKEN_LOGPROB
from jaxrl_post.kernels.token_logprob.shapes import Shape as HeadShape

__all__ = [
    "ANSWERS",
    "Arrays",
    "Case",
    "Operation",
    "Pack",
    "Pass",
    "Selection",
    "cases",
    "rows_of",
]

type Arrays = tuple[jax.Array, ...]
type Pass = Callable[..., Any]
type Pack = Literal["causal", "answers", "ragged"]
type Operation = Literal["token_logprob", "attention", "decode_attention", "next_token"]

# Answers to a prompt, in rows of trees.
ANSWERS = 8

# Shapes of interpreted kernels.
TINY: dict[Operation, Any] = {
    "token_logprob": HeadShape(64, 64, 512),
    "attention": AttentionShape(1, 128, 1, 1, 64, 64),
    "decode_attention": DecodeShape(2, 1, 2, 1, 64, 64, 64, 2, 16),
    "next_token": NextShape(4, 64, 512),
}


@dataclass(frozen=True)
class Case:
    """One line of the result, before it is measured.

    Attributes:
        operation: name.
        shape: name, with what is computed.
        implementations: by name, all passes.
        arrays: their arguments.
        small: arguments of the same kind for the reference.
        needed: FLOPs of the products that are needed, or bytes that must be read.
        unit: of `needed`.
        errors: of arguments, what an implementation found and what another one did,
            the largest differences by name, as in `relative_errors`.
    """

    operation: str
    shape: str
    implementations: dict[str, Pass]
    arrays: Callable[[], Arrays]
    small: Callable[[], Arrays]
    needed: float
    unit: Literal["FLOP", "B"] = "FLOP"
    errors: Callable[[Arrays, Any, Any], dict[str, float]] = lambda arrays, *both: (
        relative_errors(*both)
    )


class Selection(NamedTuple):
    """Choice of what is measured.

    Attributes:
        operations: names, in the order of their cases.
        shapes: names of shapes; all without one.
        packs: what the rows of attention hold, as `rows_of` says.
        dtype: of the operands.
        divide: by which rows and lengths are divided.
        interpret: whether kernels for GPUs are interpreted, each at one tiny shape.
    """

    operations: tuple[Operation, ...]
    shapes: tuple[str, ...]
    packs: tuple[Pack, ...]
    dtype: Any
    divide: int = 1
    interpret: bool = False

    def implementations(self) -> list[str]:
        """Names of the programs that run here, but for the reference and peers."""
        names = ["xla"]
        if platform() == "tpu" and self.dtype in (jnp.bfloat16, jnp.float32):
            names.append("pallas_tpu")
        if (platform() == "hopper" or self.interpret) and self.dtype == jnp.bfloat16:
            names.append("pallas_gpu")
        return names


def cases(selection: Selection) -> Iterator[Case]:
    """Yields what is measured."""
    tables: dict[Operation, Any] = {
        "token_logprob": (TOKEN_LOGPROB, _head),
        "attention": (ATTENTION, _attention),
        "decode_attention": (DECODE, _decode),
        "next_token": (NEXT_TOKEN, _next),
    }
    for operation in selection.operations:
        shapes, make = tables[operation]
        if selection.shapes:
            shapes = {n: s for n, s in shapes.items() if n in selection.shapes}
        if selection.interpret:
            shapes = {"tiny": TINY[operation]}
        for name, shape in shapes.items():
            if operation != "attention":
                yield make(name, shape, selection)
                continue
            for held in selection.packs:
                yield make(name, shape, selection, held)


def _head(name: str, shape: HeadShape, selection: Selection) -> Case:
    dtype = selection.dtype

    def arrays(rows: int, vocab: int) -> Arrays:
        keys = jax.random.split(jax.random.key(0), 4)
        hidden = jax.random.normal(keys[0], (1, rows, shape.width), dtype)
        weight = jax.random.normal(keys[1], (vocab, shape.width), dtype)
        weight = weight * jnp.asarray(shape.width**-0.5, dtype)
        targets = jax.random.randint(keys[2], (1, rows), 0, vocab, jnp.int32)
        kept = None
        if shape.kept:
            step = jnp.arange(shape.kept, dtype=jnp.int32) * 7
            kept = (targets[..., None] + step) % vocab
        return hidden, weight, targets, kept, jax.random.normal(keys[3], (1, rows))  # type: ignore[return-value]

    def both(hidden: Any, weight: Any, targets: Any, kept: Any, g: Any, *, by: str):
        def run(hidden: jax.Array, weight: jax.Array) -> Any:
            found = token_logprob(
                hidden, weight, targets,
                kept=kept, scaling=Scaling(softcap=shape.softcap),
                implementation=by, interpret=selection.interpret,  # type: ignore[arg-type]
            )  # fmt: skip
            return tuple(found)

        found, pull = jax.vjp(run, hidden, weight)
        return found, pull((g, jnp.zeros_like(g), jnp.zeros_like(g)))

    rows = max(8, shape.rows // selection.divide)
    names = ["reference", *selection.implementations()]
    return Case(
        "token_logprob",
        name,
        {by: jax.jit(functools.partial(both, by=by)) for by in names},
        functools.partial(arrays, rows, shape.vocab),
        # The logits' gradient is more than the kernel for GPUs holds at once.
        functools.partial(arrays, min(600, rows), _checked(shape.vocab)),
        6.0 * rows * shape.width * shape.vocab,
        errors=lambda arrays, *both: relative_errors(*both, logprobs=(0, 1, 2)),
    )


def _checked(vocab: int) -> int:
    """Vocabulary with which results are compared."""
    return min(vocab, 5003) if platform() == "cpu" else vocab


def _peers(shape: AttentionShape, selection: Selection) -> list[str]:
    """Other libraries' attention that computes this shape here."""
    found = []
    plain = shape.head_dim == shape.value_dim and shape.softcap is None
    gpu = platform() in ("gpu", "hopper") or selection.interpret
    if gpu and selection.dtype == jnp.bfloat16 and plain and not shape.sinks:
        found.append("cudnn")
    if importlib.util.find_spec("tokamax") is not None and not shape.sinks:
        found.append("tokamax")
    return found


def _cudnn(shape: AttentionShape, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    window = None if shape.window is None else (shape.window - 1, 0)
    # Interpreted, without a GPU, the same call takes XLA's program.
    by = "xla" if platform() == "cpu" else "cudnn"
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=window, implementation=by
    )


def _tokamax(shape: AttentionShape, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    window = None if shape.window is None else (shape.window - 1, 0)
    return importlib.import_module("tokamax").dot_product_attention(
        q, k, v,
        is_causal=True, local_window_size=window, logits_soft_cap=shape.softcap,
    )  # fmt: skip


# Functions of a shape, and of queries, keys and values [batch, length, heads, width].
PEERS = {"cudnn": _cudnn, "tokamax": _tokamax}


def rows_of(held: Pack, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and ends of packed rows, int32 [batch, length].

    Args:
        held: "causal": one sequence a row. "answers": a prompt of half of the row and
            eight answers of equal length. "ragged": as the learner gets them, several
            prompts of different lengths a row, each with eight answers of different
            lengths, and padding; the same rows every time.
        batch: rows.
        length: tokens of a row.
    """
    if held == "ragged":
        return _ragged(batch, length)
    index = np.arange(length, dtype=np.int32)
    ends, positions = np.full(length, length, np.int32), index.copy()
    if held == "answers":
        prompt = length // 2
        size = (length - prompt) // ANSWERS
        which = np.minimum((index - prompt) // size, ANSWERS - 1)
        last = np.where(which == ANSWERS - 1, length, prompt + (which + 1) * size)
        ends = np.where(index < prompt, length, last)
        start = prompt + which * size
        positions = np.where(index < prompt, index, prompt + index - start)
    rows = (array.astype(np.int32)[None] for array in (positions, ends))
    positions, ends = (np.repeat(row, batch, axis=0) for row in rows)
    return positions, ends


def _ragged(batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)

    def drawn(count: int) -> list[int]:
        """Lengths, most of them short and some eight times as long."""
        found = rng.lognormal(np.log(length / 32), 0.8, count)
        return np.clip(found, 2, length // 10).astype(int).tolist()

    units, tokens = [], 0
    while tokens < batch * length:
        (prompt,), answers = drawn(1), drawn(ANSWERS)
        branches = (Sequence.of([], [1] * size) for size in answers)
        units.append(Tree(Sequence.of([1] * prompt, []), tuple(branches)))
        tokens += prompt + sum(answers)
    packed = pack(units, length, row_multiple=1)
    return packed.positions[:batch], packed.ends[:batch]


def _attention(
    name: str, shape: AttentionShape, selection: Selection, held: Pack
) -> Case:
    def arrays(length: int) -> Arrays:
        keys = jax.random.split(jax.random.key(0), 4)
        batch, heads, kv_heads = shape.batch, shape.heads, shape.kv_heads
        sizes = [
            (batch, length, heads, shape.head_dim),
            (batch, kv_heads, length, shape.head_dim),
            (batch, kv_heads, length, shape.value_dim),
            (batch, length, heads, shape.value_dim),
        ]
        found = [
            jax.random.normal(key, size, selection.dtype)
            for key, size in zip(keys, sizes, strict=True)
        ]
        facts = [jnp.asarray(array) for array in rows_of(held, batch, length)]
        return *found, *facts

    def both(q: Any, k: Any, v: Any, g: Any, positions: Any, ends: Any, *, by: str):
        sinks = jnp.zeros(shape.heads) if shape.sinks else None
        # The results for padding are not used.
        counts = (ends > 0)[:, :, None, None]

        def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            if by in PEERS:
                return PEERS[by](shape, q, k.swapaxes(1, 2), v.swapaxes(1, 2))
            out = attention(
                q, k, v,
                Sight(positions, positions, ends),
                scoring=Scoring(shape.window, None, shape.softcap, sinks),
                implementation=by, interpret=selection.interpret,  # type: ignore[arg-type]
            )  # fmt: skip
            return jnp.where(counts, out, jnp.zeros_like(out))

        out, pull = jax.vjp(run, q, k, v)
        return out, pull(g)

    length = max(min(256, shape.length), shape.length // selection.divide)
    positions, ends = rows_of(held, shape.batch, length)
    back = shape.window or length
    # A token sees itself and what is before it on its path; padding sees nothing.
    seen = float((np.minimum(positions + 1, back) * (ends > 0)).sum())
    names = ["reference", *selection.implementations()]
    if held == "causal":
        names += _peers(shape, selection)
    widths = shape.head_dim + shape.value_dim
    return Case(
        "attention",
        f"{name}, {f'{ANSWERS} answers' if held == 'answers' else held}",
        {by: jax.jit(functools.partial(both, by=by)) for by in names},
        functools.partial(arrays, length),
        functools.partial(arrays, min(600, length)),
        # Scores and mixing, and twice as much backward.
        3 * 2.0 * seen * shape.heads * widths,
    )


def _decode(name: str, shape: DecodeShape, selection: Selection) -> Case:
    dtype = selection.dtype

    def entries(key: jax.Array, sizes: tuple[int, int], width: int) -> Any:
        if not width:
            return None
        size = sizes[0], shape.kv_heads, sizes[1], width
        drawn = jax.random.normal(key, size, dtype)
        return drawn if shape.codes is None else quantize_entries(drawn, shape.codes)

    def arrays(batch: int, own: int, shared: int) -> Arrays:
        keys = jax.random.split(jax.random.key(0), 5)
        widths = shape.head_dim, shape.value_dim
        of_query = batch, shape.queries, shape.heads, shape.head_dim
        mine = [entries(keys[i], (batch, own), w) for i, w in enumerate(widths)]
        positions = shared + jnp.arange(own, dtype=jnp.int32)
        last = positions[-shape.queries :]
        common = None
        if shape.members:
            groups = -(-batch // shape.members)
            sizes = groups, shared
            both = [
                entries(k, sizes, w) for k, w in zip(keys[2:], widths, strict=False)
            ]
            at = jnp.broadcast_to(jnp.arange(shared, dtype=jnp.int32), sizes)
            common = *both, at, jnp.arange(batch, dtype=jnp.int32)
        query = jax.random.normal(keys[4], of_query, dtype)
        at = jnp.broadcast_to(last, (batch, shape.queries))
        of_key = jnp.broadcast_to(positions, (batch, own))
        return query, *mine, at, of_key, common  # type: ignore[return-value]

    def run(query: Any, key: Any, value: Any, at: Any, of_key: Any, common: Any, *, by):
        sinks = jnp.zeros(shape.heads) if shape.sinks else None
        return decode_attention(
            query, OwnKeys(key, value, of_key), at,
            shared=common and SharedKeys(*common, members=shape.members),
            scoring=Scoring(shape.window, None, shape.softcap, sinks),
            implementation=by, interpret=selection.interpret,
        )  # fmt: skip

    least = max(16, shape.queries)
    own, shared = (max(least, n // selection.divide) for n in (shape.own, shape.shared))
    # The keys that the window leaves, of the samples and of the groups.
    back = (shape.window or own + shared) + shape.queries - 1
    seen = shape.batch * min(own, back)
    if shape.members:
        seen += -(-shape.batch // shape.members) * max(0, min(shared, back - own))
    each = (shape.head_dim + shape.value_dim) * jnp.dtype(shape.codes or dtype).itemsize
    if shape.codes is not None:
        each += 2 * 4
    names = ["reference", *selection.implementations()]
    return Case(
        "decode_attention",
        name,
        {by: jax.jit(functools.partial(run, by=by)) for by in names},
        functools.partial(arrays, shape.batch, own, shared),
        functools.partial(arrays, max(4, shape.members), max(96, shape.queries), 48),
        float(seen * shape.kv_heads * each),
        "B",
    )


def _next(name: str, shape: NextShape, selection: Selection) -> Case:
    dtype = selection.dtype

    def arrays(rows: int, vocab: int) -> Arrays:
        keys = jax.random.split(jax.random.key(0), 3)
        hidden = jax.random.normal(keys[0], (rows, shape.width), dtype)
        weight = jax.random.normal(keys[1], (vocab, shape.width), dtype)
        weight = weight * jnp.asarray(shape.width**-0.5, dtype)
        return hidden, weight, jax.random.uniform(keys[2], (rows,)), jnp.ones(rows)

    options = {"softcap": shape.softcap, "interpret": selection.interpret}
    names = ["reference", *selection.implementations()]
    return Case(
        "next_token",
        name,
        {
            by: jax.jit(functools.partial(next_token, implementation=by, **options))  # type: ignore[arg-type]
            for by in names
        },
        functools.partial(arrays, shape.rows, shape.vocab),
        functools.partial(arrays, min(30, shape.rows), _checked(shape.vocab)),
        float(shape.vocab * shape.width * jnp.dtype(dtype).itemsize),
        "B",
        errors=lambda arrays, found, expected: drawn_errors(
            arrays, found, shape.softcap
        ),
    )

"""FLOPs and memory traffic of a device, counted from a model's shapes.

XLA's own cost analysis counts the body of a loop once, so it knows neither the number
of layers of a scan nor the number of decoding steps. Here every matrix product is
counted:

    FLOPs   2 x rows x inputs x outputs
    bytes   the matrix, rows x inputs and rows x outputs, each read or written once

and for attention the products of queries with all keys, masked ones included, and of
the probabilities with all values: an upper bound, since training skips the tiles that
are masked. Elementwise operations are taken to be part of the products (no bytes, no
FLOPs), and so are the scores of a tile of attention, which the compiler keeps on the
chip.

The bytes that a device receives are a ring's: of matrices that the batch's axes split,
of sums over tp, of experts' tokens, of chunks' keys and of gradients. They are a lower
bound, since a compiler may gather a matrix more than once.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_post.kernels.attention import TILE
from jaxrl_post.kernels.decode_attention import CODE_DTYPES
from jaxrl_post.kernels.linear_attention import CHUNK
from jaxrl_post.kernels.token_logprob import tile_rows
from jaxrl_post.models import ModelConfig, param_specs
from jaxrl_post.models.decoder import Remat
from jaxrl_post.models.matrix import INPUT_DIMS, target_name
from jaxrl_post.models.params import text_specs
from jaxrl_post.models.recurrences import GatedDelta, LinearAttention
from jaxrl_post.models.spec import ParamSpec, is_spec
from jaxrl_post.models.stack import staged_span
from jaxrl_post.programs.planning.chips import NO_WORK, Chip, Work
from jaxrl_post.programs.planning.links import slowdown
from jaxrl_post.sharding import Rules, dividing_axes, split_size
from jaxrl_post.sharding.stages import STAGE_AXIS, Schedule

__all__ = ["ModelWork", "Product"]

# Leaves of the parameters that are factors of matrix products; the others are norms,
# biases and the embedding, which is looked up.
MATRICES = (
    "query", "key", "value", "output",
    "query_down", "query_up", "kv_down", "kv_up",
    "input_gate", "output_gate", "inputs", "outputs", "beta", "decay", "step",
    "narrow", "widen", "gate", "up", "down", "router", "shared_gate", "projection",
    "unembedding",
)  # fmt: skip
# Their inputs are their last dimension, as of [experts, hidden] and [vocab, hidden].
TRANSPOSED = ("router", "shared_gate", "unembedding")
# Their outputs are their last dimension, and not all dimensions but the first.
NARROW = ("output", "outputs", "down")

# Bytes of the gradient in an optimizer step, per parameter: it is float32, and is read
# twice, since its norm comes first.
GRADIENT_BYTES = 4 * 2


class Product(NamedTuple):
    """A matrix of the model in products of one device.

    Attributes:
        name: path of the parameter.
        inputs: values that go into a row, on the device.
        outputs: values that come out of a row, on the device.
        experts: matrices that the device holds of this kind; 1 without experts.
        chosen: experts of a token; 0 for a matrix that is applied to every token.
        all_experts: number of experts over all devices.
        parts: parts over which the batch's mesh axes split the matrix; the parts are
            gathered before a product.
        summed: parts over which other axes split its inputs; the products of the parts
            are summed.
        staged: whether a pipeline stage has the matrix, and others never need it.
    """

    name: str
    inputs: int
    outputs: int
    experts: int = 1
    chosen: int = 0
    all_experts: int = 1
    parts: int = 1
    summed: int = 1
    staged: bool = False

    @property
    def layer(self) -> int:
        """Number of the layer; -1 outside of the layers."""
        first, _, rest = self.name.partition(".")
        return int(rest.partition(".")[0]) if first == "layers" else -1

    @property
    def size(self) -> int:
        """Parameters of a device after the gather."""
        return self.experts * self.inputs * self.outputs

    def rows(self, tokens: float) -> float:
        """Rows of a device that computes `tokens` tokens, if experts are balanced."""
        return tokens * (self.chosen or 1)

    def used(self, tokens: float) -> float:
        """Share of the experts that any of `tokens` tokens chooses, at random."""
        if not self.chosen:
            return 1.0
        return 1.0 - (1.0 - self.chosen / self.all_experts) ** tokens


def _of_stage(product: Product, staged: range, schedule: Schedule) -> Product:
    """A product of a stage's layers, which the stages do not gather."""
    if product.layer not in staged or product.parts % schedule.stages:
        return product
    parts = product.parts // schedule.stages
    return product._replace(parts=parts, staged=True)


@dataclass(frozen=True)
class ModelWork:
    """Counts the work of a model's programs on one device of a mesh.

    Attributes:
        config: the model's config.
        mesh: of the parameters; only its shape is used.
        rules: logical axis to mesh axes.
        dtype: of parameters and activations.
        cache_dtype: of the cache, as in `KVCache.zeros`; None for `dtype`.
        bytes_of_weights: whether the layers' matrices are a byte an element.
        float8: whether their products are computed in float8.
        chip: says how many devices links join; None if they join all.
    """

    config: ModelConfig
    mesh: Mesh
    rules: Rules
    dtype: jnp.dtype
    cache_dtype: jnp.dtype | None = None
    bytes_of_weights: bool = False
    float8: bool = False
    chip: Chip | None = None

    def products(self) -> tuple[Product, ...]:
        """The matrices of all layers and of the head, in the order of the tree."""
        leaves = jax.tree_util.tree_leaves_with_path(
            text_specs(self.config), is_leaf=is_spec
        )
        found = []
        for path, spec in leaves:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            if self.config.tie_embeddings and name == "embedding":
                name = "unembedding"
            if name.rpartition(".")[2] in MATRICES:
                found.append(self._product(name, spec))
        return tuple(found)

    def prefill(self, rows: int, length: int, before: int = 0) -> Work:
        """One call of the sampler's prefill.

        The last layer stops at its keys and values, because prefill has no logits.
        Layers after it that read the keys of others are not run at all.

        Args:
            rows: chunks of prompts, over all devices.
            length: padded tokens of a chunk.
            before: tokens in the cache before each chunk.
        """
        tokens, own = self._local(rows * length), self._local(rows)
        last = self._last_with_keys()
        needed = [
            product
            for product in self._layers()
            if product.layer < last
            or (
                product.layer == last
                and product.name.rpartition(".")[2] in ("key", "value", "kv_down")
            )
        ]
        pairs = own * length * (length + before) * last / self.config.num_layers
        # The entries before a chunk are copied out of their pages, then read.
        entries = own * (length + 3 * before)
        attended = Work(pairs * self._cached_pair_flops(), entries * self.cache_bytes)
        embedded = self._lookup(tokens) + self._gathered_tables()
        mixed = attended + self._linear(tokens, chunked=True)
        exchanged = self._exchanged(needed, tokens)
        return embedded + self._forward(needed, tokens) + mixed + exchanged

    def decode(
        self,
        slots: int,
        own: int,
        steps: int,
        *,
        groups: int = 0,
        members: int = 1,
        shared: int = 0,
        read: float | None = None,
    ) -> Work:
        """One burst of decoding.

        The compiler gathers layers and head at every step, but experts and the
        embedding, which may be the head too, once per burst.

        Args:
            slots: samples over all devices.
            own: cache entries of its own in a sample's view, which is padded.
            steps: of the burst.
            groups: groups of samples over all devices.
            members: samples of a group, padded.
            shared: cache entries that a step reads per group.
            read: of the samples' own entries, those that a step reads, over all
                devices: kernels skip the padding. None for all.
        """
        local, local_groups = self._local(slots), self._local(max(groups, 1))
        entries = self.view_entries(slots, own, groups=groups, shared=shared)
        pairs = local * own + local_groups * members * shared
        padding = 0.0 if read is None else local * (own - read / slots)
        step = self._lookup(local) + Work(
            pairs * self._cached_pair_flops(),
            (entries - padding + local) * self.cache_bytes,
        )
        step += self._exchanged(self.products(), local)
        step += self._linear(local, chunked=False)
        burst = self._gathered_tables()
        for product in self.products():
            step += self._multiplied(product, local)
            if product.chosen:
                burst += self._gather(product)
            elif not (product.name == "unembedding" and self.config.tie_embeddings):
                step += self._gather(product)
        # The view is copied out of the pages, and the new entries back.
        copied = 2 * (entries + local * steps) * self.cache_bytes
        return step * steps + burst + Work(0.0, copied)

    def view_entries(
        self, slots: int, own: int, *, groups: int = 0, shared: int = 0
    ) -> float:
        """Cache entries of a device in a burst's view; arguments as of `decode`."""
        return self._local(slots) * own + self._local(max(groups, 1)) * shared

    def accumulate(
        self,
        rows: int,
        length: int,
        scored: float,
        remat: Remat,
        *,
        scan: bool,
        seen: float | None = None,
        rounds: int | None = None,
    ) -> Work:
        """One call of the learner's accumulate: a forward and a backward pass.

        Stages of a pipeline compute in every tick, in idle ones for nothing.

        Args:
            rows: packed rows over all devices.
            length: tokens of a row.
            scored: tokens over all devices that the loss counts; only these have
                logits.
            remat: what the backward pass computes again.
            scan: whether the weights of the layers are stacked, which copies them.
            seen: keys that a token attends to, mean; None for all of its row.
            rounds: chunks of layers of a stage, as of `models.stack.Execution`.
        """
        tokens = self._local(rows * length)
        layers, schedule = self._layers(), self.schedule(rows, rounds)
        busy, passed = 1.0, NO_WORK
        if schedule is not None:
            span = staged_span(self.config, schedule.stages, rounds)
            staged = range(span.first, span.end)
            layers = [_of_stage(p, staged, schedule) for p in layers]
            busy -= len(staged) / self.config.num_layers * schedule.bubble
            held = sum(p.size / p.parts for p in layers if p.layer in staged)
            passed = self._passed(schedule, tokens / schedule.groups, held)
        # One of the backward pass's two products reads the matrix, and one writes its
        # gradient, as large as the gathered matrix.
        work = self._lookup(tokens) + self._forward(layers, tokens) * (1 + 2)
        if remat == "full":
            work += self._forward(filter(self._recomputed, layers), tokens)
        pairs = tokens * (length if seen is None else seen) * self._pair_flops()
        # A tile's backward pass computes its scores again, for every `remat`.
        again = int(remat != "none") + int(length > TILE)
        work += Work(pairs * (1 + again + 2), 0.0)
        # The backward pass computes all of a chunk again but its states.
        work += self._linear(tokens, chunked=True) * (1 + int(remat != "none") + 1 + 2)
        work = work * (1 / busy) + passed
        if scan or schedule is not None:
            # Weights into the stack, gradients out of it, each read and written.
            stacked = sum(p.size / p.parts for p in layers)
            work += Work(0.0, 4 * stacked * self.dtype.itemsize)
        # The float32 sums of gradients are read and written, and so is the embedding's
        # gradient before it is summed over devices.
        owned = sum(product.size / product.parts for product in self.products())
        looked_up = sum(table.size for table in self._tables())
        sums = Work(0.0, 2 * 4 * (owned + looked_up))
        tables = self._gathered_tables()
        if not self.config.tie_embeddings:
            tables = tables + self._gather(self._table())
        received = self._learned(tokens, owned, remat)
        return work + tables + self._scores(scored) + sums + received

    def schedule(self, rows: int, rounds: int | None = None) -> Schedule | None:
        """The schedule of a pass over `rows` rows; None without stages."""
        stages = self.mesh.shape.get(STAGE_AXIS, 1)
        if stages == 1:
            return None
        span = staged_span(self.config, stages, rounds)
        groups = max(1, rows // split_size("batch", self.mesh, self.rules))
        return Schedule(stages, span.repeats // stages, groups)

    def tiles(self, scored: float) -> int:
        """Tiles of logits of a device, if the loss counts `scored` tokens in total."""
        own = scored / split_size("batch", self.mesh, self.rules)
        return max(1, math.ceil(own / tile_rows(self._table().outputs)))

    def apply(self, parameters: float, state_bytes: float) -> Work:
        """The optimizer step; the products of Muon are left out.

        Args:
            parameters: trained parameters that a device owns.
            state_bytes: of the optimizer on a device, which are read and written.
        """
        wide = self.dtype == jnp.float32
        # The weights that are updated are float32; narrower ones are written too.
        weights = 2 * 4 + (0 if wide else self.dtype.itemsize)
        moved = parameters * (GRADIENT_BYTES + weights) + 2 * state_bytes
        return Work(0.0, moved)

    @property
    def cache_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers, on one device."""
        dtype = self.cache_dtype or self.dtype
        # Codes have a float32 scale per token and head.
        beside = 4 if dtype.name in CODE_DTYPES else 0
        total = 0
        for layer in range(self.config.num_layers):
            heads, *widths = self.config.cache_shape(layer) or (0, 0, 0)
            size = sum(width * dtype.itemsize + beside for width in widths if width)
            total += heads // self._parts("kv_heads", heads) * size
        return total

    @property
    def table_bytes(self) -> int:
        """Bytes of the gathered tables, for both passes, and of float32 gradients."""
        both = 2 * self.dtype.itemsize
        return sum(
            table.size * (4 + both * (table.parts > 1)) for table in self._tables()
        )

    def _layers(self) -> list[Product]:
        return [p for p in self.products() if p.name != "unembedding"]

    def _recomputed(self, product: Product) -> bool:
        """Whether the backward pass of a layer needs the outputs of a product.

        Nothing in a layer depends on the output of an MLP but a norm or a gate.
        """
        experts = self.config.experts
        gated = experts is not None and experts.shared_gate
        last = product.name.endswith("mlp.down") or (
            product.name.endswith("shared.down") and not gated
        )
        return not last or self.config.norm_placement != "before"

    def _table(self) -> Product:
        """The embedding, or the matrix of the head, which has the same layout."""
        return self._product("unembedding", param_specs(self.config).embedding)

    def _tables(self) -> list[Product]:
        """The tables that tokens are looked up in: of the first layer, and of all."""
        per_layer = param_specs(self.config).per_layer
        if per_layer is None:
            return [self._table()]
        return [self._table(), self._product("unembedding", per_layer.embedding)]

    def _gathered_tables(self) -> Work:
        return sum(map(self._gather, self._tables()), NO_WORK)

    def _lookup(self, tokens: float) -> Work:
        """Looks tokens up in the tables."""
        width = sum(table.inputs for table in self._tables())
        return Work(0.0, 2 * tokens * width * self.dtype.itemsize)

    def _forward(self, products: Iterable[Product], tokens: float) -> Work:
        """The products of a forward pass over a device's tokens."""
        return sum(
            (self._gather(p) + self._multiplied(p, tokens) for p in products), NO_WORK
        )

    def _gather(self, product: Product) -> Work:
        """Reads a device's part of a matrix and writes the whole, if it is split."""
        if product.parts == 1:
            return NO_WORK
        itemsize, other = self._itemsize(product), 1 / product.parts
        axes = ("fsdp", "cp") if product.chosen else ("fsdp", "ep", "cp")
        if not product.staged:
            axes = STAGE_AXIS, *axes
        received = product.size * (1 - other) * itemsize * self.slower(*axes)
        return Work(0.0, product.size * (1 + other) * itemsize, received)

    def _exchanged(self, products: Iterable[Product], tokens: float) -> Work:
        """Sums of the products' outputs over tp, and tokens that go to experts."""
        received, wide = 0.0, tokens * self.config.hidden_size * self.dtype.itemsize
        for each in products:
            # A product with codes sums float32, which is scaled and rounded afterwards.
            size = wide * (4 / self.dtype.itemsize if self._in_codes(each) else 1)
            received += 2 * (1 - 1 / each.summed) * size * self.slower("tp")
            # Each device of ep gets all tokens, and sums what all made of its own.
            if each.chosen and each.name.rpartition(".")[2] in ("up", "down"):
                others = each.all_experts // each.experts - 1
                received += others * wide * self.slower("ep")
        return Work(0.0, 0.0, received)

    def _passed(self, schedule: Schedule, tokens: float, held: float) -> Work:
        """Weights and activations that stages receive, forward and backward.

        Args:
            schedule: of the pass.
            tokens: of a microbatch, on a device.
            held: parameters of a stage's layers on a device, times the stages.
        """
        width = self.config.hidden_size // self._parts(
            "passed", self.config.hidden_size
        )
        # Each tick moves inputs, outputs, and what the next stage continues with.
        moved = 3 * schedule.ticks * tokens * width
        exchanged = held / schedule.stages * (1 - 1 / schedule.stages)
        received = 2 * (moved + exchanged) * self.dtype.itemsize
        return Work(0.0, 0.0, received * self.slower(STAGE_AXIS))

    def _learned(self, tokens: float, owned: float, remat: Remat) -> Work:
        """Activations and sums of gradients that `accumulate` receives.

        Args:
            tokens: of a device.
            owned: parameters of a device.
            remat: as in `accumulate`.
        """
        layers, shape = self._layers(), self.mesh.shape
        work = self._exchanged(layers, tokens) * 2
        if remat == "full":
            work += self._exchanged(filter(self._recomputed, layers), tokens)
        # The other chunks' keys and values, forward and backward, with the gradients.
        rounds = 2 + int(remat != "none") + 4 / self.dtype.itemsize
        ring = (shape["cp"] - 1) * tokens * self.cache_bytes * rounds
        summed = 2 * (1 - 1 / shape["dp"]) * owned * self.dtype.itemsize
        received = ring * self.slower("cp") + summed * self.slower("dp")
        return work + Work(0.0, 0.0, received)

    def slower(self, *names: str) -> float:
        """Times that a collective over axes takes longer than over links alone."""
        return slowdown(self.mesh, names, self.chip)

    def _in_codes(self, product: Product) -> bool:
        return self.bytes_of_weights and target_name(product.name) in INPUT_DIMS

    def _itemsize(self, product: Product) -> int:
        return 1 if self._in_codes(product) else self.dtype.itemsize

    def _multiplied(self, product: Product, tokens: float) -> Work:
        rows, itemsize = product.rows(tokens), self.dtype.itemsize
        # Devices along ep apply their experts to the tokens of the whole group.
        group = tokens * product.all_experts / product.experts if product.chosen else 0
        wide = 4 if product.name == "unembedding" else itemsize
        moved = rows * (product.inputs * itemsize + product.outputs * wide)
        flops = 2 * rows * product.inputs * product.outputs
        return Work(
            flops,
            product.size * product.used(group) * self._itemsize(product) + moved,
            float8=flops if self.float8 and self._in_codes(product) else 0.0,
        )

    def _scores(self, scored: float) -> Work:
        """Log-probs of a device's share of the scored tokens, and their gradients."""
        head, tiles = self._table(), self.tiles(scored)
        once = self._multiplied(head, tile_rows(head.outputs))
        # Forward, two products backward, and the logits again except the first tile's.
        # Every tile adds to a float32 gradient of the matrix.
        return once * (4 * tiles - 1) + Work(0.0, 2 * 4 * head.size * tiles)

    def _pair_flops(self) -> float:
        """FLOPs of one query with one key, on a device, over all layers."""
        latent, config = self.config.latent, self.config
        if latent is not None:
            widths = config.head_dim + latent.value_dim
            return self._head_flops(widths * config.count("attention"))
        return self._head_flops(2 * self._head_dims())

    def _cached_pair_flops(self) -> float:
        """As `_pair_flops`, with a cache; latent attention's keys are also values."""
        latent, config = self.config.latent, self.config
        if latent is not None:
            entry = latent.kv_rank + latent.rope_dim
            return self._head_flops(2 * entry * config.count("attention"))
        return self._head_flops(2 * self._head_dims())

    def _head_dims(self) -> int:
        """Sum of the widths of a head over all layers of attention."""
        config = self.config
        return sum(
            config.heads(layer).head_dim
            for layer in range(config.num_layers)
            if config.layer(layer).mixer == "attention"
        )

    def _last_with_keys(self) -> int:
        """The last layer that does not read the keys of another."""
        layers = range(self.config.num_layers)
        return max(i for i in layers if self.config.layer(i).keys_of is None)

    def _linear(self, tokens: float, *, chunked: bool) -> Work:
        """Linear attention of a device's heads, over all layers that have it.

        Args:
            tokens: that a device has.
            chunked: whether they are computed in chunks, or one step of each row.
        """
        kind, config = self.config.recurrence, self.config
        if not isinstance(kind, LinearAttention):
            return NO_WORK
        state, width = kind.key_dim * kind.value_dim, kind.key_dim + kind.value_dim
        # A state is read for the query and written; the delta rule reads it for the key
        # too, and in chunks takes as many products again for what values become. XLA's
        # step passes over the state three times.
        delta = isinstance(kind, GatedDelta)
        products, values = (2 + delta) * state, 3.0 * state
        if chunked:
            products += (1 + delta) * CHUNK * width
            values = 2 * state / CHUNK
        heads = kind.value_heads // self._parts("heads", kind.key_heads)
        times = tokens * heads * config.count("recurrence")
        return Work(2 * products * times, 4 * values * times)

    def _head_flops(self, width: int) -> float:
        """FLOPs of products with a number of dims of every query head."""
        heads = self.config.num_heads // self._parts("heads", self.config.num_heads)
        return 2 * heads * width

    def _local(self, count: float) -> float:
        """A device's part of rows or tokens; all of them if they do not divide."""
        split = split_size("batch", self.mesh, self.rules)
        return count if count % split else count / split

    def _product(self, name: str, spec: ParamSpec) -> Product:
        shape, split, parts, experts = [], [], 1, 1
        batch = self.rules.mesh_axes("batch")
        for size, axis in zip(spec.shape, spec.axes, strict=True):
            axes = dividing_axes(axis, size, self.mesh, self.rules)
            by = math.prod(self.mesh.shape[a] for a in axes)
            if axis == "experts":
                experts = size // by
                continue
            gathered = bool(set(axes) & set(batch))
            parts *= by if gathered else 1
            split.append(1 if gathered else by)
            shape.append(size // split[-1])
        leaf, chosen, total = name.rpartition(".")[2], 0, 1
        if "experts" in spec.axes:
            assert self.config.experts is not None
            chosen = self.config.experts.experts_per_token
            total = self.config.experts.num_experts
        if leaf in TRANSPOSED:
            shape = [shape[1], shape[0]]
        cut = len(shape) - 1 if leaf in NARROW else 1
        inputs, outputs = math.prod(shape[:cut]), math.prod(shape[cut:])
        summed = math.prod(split[:cut]) if leaf in NARROW else 1
        return Product(name, inputs, outputs, experts, chosen, total, parts, summed)

    def _parts(self, axis: str, size: int) -> int:
        axes = dividing_axes(axis, size, self.mesh, self.rules)
        return math.prod(self.mesh.shape[a] for a in axes)

"""Hyperparameters of a decoder-only transformer.

One frozen, hashable `ModelConfig` covers all families; options that a family lacks keep
their defaults. All options here change the model's outputs. Mesh, kernels and the run's
precision are configured elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from jaxrl_post.models.layer_spec import (
    HeadSpec,
    Indexer,
    LayerSpec,
    PerLayerEmbedding,
    check_indexed,
    check_keys,
)
from jaxrl_post.models.recurrences import Recurrence
from jaxrl_post.models.vision_config import VisionInputs

__all__ = [
    "Activation",
    "Head",
    "HeadSpec",
    "Indexer",
    "LatentAttention",
    "LayerSpec",
    "MixtureOfExperts",
    "ModelConfig",
    "PerLayerEmbedding",
    "QueryScaling",
    "RopeScaling",
]

# The output layer on the last hidden state: logits of the vocabulary; one value, as in
# critics and reward models; both, as in a critic that shares the policy's backbone; or
# the logits of wrong and right, as in process reward models.
Head = Literal["lm", "value", "lm+value", "process"]

# The activation on a gated MLP's gate. "gpt_oss" computes (up + 1) * gate *
# sigmoid(1.702 gate) with gate at most 7 and up within [-7, 7]. "relu2" has no gate: it
# is relu(up)^2.
Activation = Literal["silu", "gelu", "gelu_tanh", "gpt_oss", "relu2"]


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the pre-training context.

    Attributes:
        kind: "linear" (Chen et al., arXiv:2306.15595), "dynamic" (NTK-aware, grows with
            the sequence), "llama3" (Llama 3.1), "yarn" (arXiv:2309.00071), "longrope"
            (arXiv:2402.13753).
        factor: target context over original context, >= 1.
        original_length: context length of pre-training, in tokens; None means the
            config's `max_length`.
        low_frequency_factor: llama3 only.
        high_frequency_factor: llama3 only.
        beta_fast: yarn only; frequencies with more rotations over the original context
            are not changed.
        beta_slow: yarn only; frequencies with fewer rotations are fully interpolated.
        attention_factor: yarn and longrope; scale of cos and sin, None for the
            paper's value.
        mscale: yarn only, DeepSeek's option; None if the checkpoint has none.
        mscale_all_dim: yarn only, DeepSeek's option.
        truncate: yarn only; whether the correction range is rounded to whole dims.
        short_factors: longrope only; divisors of the frequencies in rows up to the
            original context.
        long_factors: longrope only; divisors in longer rows.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float = 1.0
    original_length: int | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class QueryScaling:
    """Scaling of queries by position, which keeps attention sharp in long contexts.

    A query at position p is multiplied by 1 + strength ln(1 + floor(p / length)).

    Attributes:
        strength: strength of the scaling, > 0.
        length: pre-training context in tokens; queries within it are not scaled.

    References:
        Nakanishi, Scalable-Softmax Is Superior for Attention, arXiv:2501.19399, in the
        form of Llama 4.
    """

    strength: float
    length: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values come from a low-rank latent.

    Attributes:
        kv_rank: width of the latent, which the cache holds.
        nope_dim: dims of a query or key head without rotation.
        rope_dim: rotated dims; all heads share the rotated key.
        value_dim: width of a value head.
        query_rank: width of the queries' latent; None for no latent.
        norm_eps: epsilon of the latents' norms.
        indexer: of sparse attention, which needs `query_rank`; None for full attention.

    References:
        DeepSeek-V2, arXiv:2405.04434.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None
    norm_eps: float = 1e-6
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        if self.indexer is not None and self.query_rank is None:
            raise ValueError(
                "config: query_rank must not be None with an indexer, which reads the "
                "queries' latent"
            )
        if self.indexer is not None and self.indexer.head_dim < self.rope_dim:
            raise ValueError(
                "config: head_dim of the indexer must be at least the rotated dims, "
                f"{self.rope_dim}; got {self.indexer.head_dim}"
            )


@dataclass(frozen=True)
class MixtureOfExperts:
    """A mixture of experts: how the router chooses and weights a token's experts.

    scores = softmax or sigmoid of the router's float32 logits. A token goes to the
    `experts_per_token` experts with the largest scores (plus `correction_bias`, if any)
    within the best groups, if there are groups. Their weights are their scores, divided
    by the sum of these if `normalize`, times `scale`.

    Attributes:
        num_experts: number of experts per layer.
        experts_per_token: number of experts per token.
        expert_size: width of an expert's MLP.
        scoring: function from the router's logits to scores.
        normalize: whether a token's weights sum to `scale`.
        normalize_epsilon: added to the sum of scores before the division.
        scale: factor of the weights.
        num_groups: number of groups of experts; 1 for no groups.
        groups_per_token: number of groups per token.
        group_score: a group's score: its largest score, or the sum of its two largest.
        correction_bias: a bias per expert in the selection alone (DeepSeek-V3's
            loss-free balancing, arXiv:2408.15664), without a gradient.
        router_bias: a bias on the router's logits.
        biases: biases in the experts.
        shared_size: width of a shared MLP for every token; 0 for none.
        shared_gate: whether the sigmoid of a projection scales the shared MLP.
        latent_size: width to which tokens are projected for the experts, and back from
            after them; 0 for none.
        scaled_router: the router reads RMSNorm(h) * scale / sqrt(hidden_size) of the
            residual stream h, and a token's weight of an expert is multiplied by a
            learned scale of that expert.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    normalize_epsilon: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    group_score: Literal["max", "top2"] = "max"
    correction_bias: bool = False
    router_bias: bool = False
    biases: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    latent_size: int = 0
    scaled_router: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"config: experts_per_token must lie in 1..{self.num_experts}, the "
                f"number of experts; got {self.experts_per_token}"
            )
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(
                f"config: num_groups must divide num_experts={self.num_experts}; got "
                f"{self.num_groups}"
            )
        usable = self.groups_per_token * self.num_experts // self.num_groups
        if not 1 <= self.groups_per_token <= self.num_groups or (
            usable < self.experts_per_token
        ):
            raise ValueError(
                f"config: groups_per_token must lie in 1..{self.num_groups} and hold "
                f"{self.experts_per_token} experts; got {self.groups_per_token}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """The architecture and sizes of a decoder; hashable, a static jit argument.

    Attributes:
        model_type: the family, by Hugging Face's name, such as "qwen3".
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: number of decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: width of a head; default hidden_size / num_heads.
        max_length: context length in tokens.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: None for plain rotary embeddings.
        rotary_dim: leading dims of a head that rotate, even; None for all.
        rope_interleaved: neighbouring dims rotate together, not the two halves.
        local_rope_theta: base in layers with a window, without scaling; None if all
            layers have the same rotary embedding.
        qkv_bias: biases on the query, key and value projections.
        output_bias: bias on the attention's output projection.
        mlp_bias: biases in the MLP.
        qk_norm: RMSNorm of queries and keys before RoPE: over each head, or jointly
            over all heads; None for none.
        qkv_clip: bound of the absolute values of queries, keys and values.
        tie_embeddings: the embedding also maps hidden states to logits.
        sinks: each head has a learned extra logit in the softmax, without a value
            (arXiv:2309.17453).
        attention_scale: factor of the scores; None for head_dim ** -0.5.
        query_scaling: scaling of queries by position, not with latent attention.
        attention_softcap: c in c tanh(scores / c).
        logit_softcap: c in c tanh(logits / c).
        norm_placement: norms before attention and MLP, after them (inside the residual
            branch), or both.
        norm_plus_one: RMSNorm multiplies by 1 + weight.
        activation: activation of the MLP.
        embedding_scale: factor of the embeddings.
        residual_scale: factor of attention's and the MLP's outputs.
        logit_divisor: divisor of the logits, applied before the softcap.
        latent: multi-head latent attention; None for grouped-query attention.
        experts: a mixture of experts instead of the MLP, or next to it; None for dense
            layers.
        recurrence: the kind of layers that carry a state in place of attention; None
            for attention in all.
        layers: each layer's parts. The empty tuple, which is stored for such layers
            too: attention everywhere, without windows, and experts if there are any.
        attention_gate: attention's output is multiplied by the sigmoid of a gate, which
            the second half of the queries' projection gives for each head.
        value_norm: RMSNorm of values over each head, without a weight.
        layer_scale: a layer's output is multiplied by a number of the checkpoint, which
            has no gradient.
        per_layer: embeddings of tokens for every layer; None for none.
        initializer_range: standard deviation of initial matrices and embeddings.
        vision: pictures among the tokens; None for a model of text.
        head: output layer on the last hidden state.

    >>> config = ModelConfig("llama", 256, 64, 128, 2, num_heads=4, num_kv_heads=2)
    >>> config.head_dim, config.rotated_dims, config.score_scale
    (16, 16, 0.25)
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 0
    max_length: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    rope_interleaved: bool = False
    local_rope_theta: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "joint"] | None = None
    qkv_clip: float | None = None
    tie_embeddings: bool = False
    sinks: bool = False
    attention_scale: float | None = None
    query_scaling: QueryScaling | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    norm_placement: Literal["before", "after", "both"] = "before"
    norm_plus_one: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    latent: LatentAttention | None = None
    experts: MixtureOfExperts | None = None
    recurrence: Recurrence | None = None
    layers: tuple[LayerSpec, ...] = ()
    attention_gate: bool = False
    value_norm: bool = False
    layer_scale: bool = False
    per_layer: PerLayerEmbedding | None = None
    initializer_range: float = 0.02
    vision: VisionInputs | None = None
    head: Head = "lm"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads"):
            self._check_count(name)
        if not self.head_dim:
            latent, width = self.latent, self.hidden_size // self.num_heads
            if latent is not None:
                width = latent.nope_dim + latent.rope_dim
            object.__setattr__(self, "head_dim", width)
        for name in (
            "vocab_size",
            "intermediate_size",
            "num_layers",
            "head_dim",
            "max_length",
        ):
            self._check_count(name)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config: num_heads must be a multiple of num_kv_heads; "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        dims = self.rotated_dims
        if dims % 2 or not 2 <= dims <= self.head_dim:
            name = "head_dim" if self.rotary_dim is None else "rotary_dim"
            raise ValueError(
                f"config: {name} must be even for rotary embeddings, and no more than "
                f"head_dim={self.head_dim}; got {dims}"
            )
        if self.query_scaling is not None and self.latent is not None:
            raise ValueError(
                "config: query_scaling must be None with latent attention, which does "
                f"not have it; got {self.query_scaling}"
            )
        if self.indexer is not None and self.attention_softcap is not None:
            raise ValueError(
                "config: attention_softcap must be None with an indexer; got "
                f"{self.attention_softcap}"
            )
        tables = self.per_layer
        if tables is not None and tables.vocab_size < self.vocab_size:
            raise ValueError(
                f"config: tables of per-layer embeddings must have {self.vocab_size} "
                f"rows, one for each token; got {tables.vocab_size}"
            )
        self._check_layers()
        self._check_scaling()
        if self.vision is not None:
            self.vision.check(
                hidden_size=self.hidden_size,
                rotated_dims=self.rotated_dims,
                vocab_size=self.vocab_size,
                num_layers=self.num_layers,
            )

    def _check_count(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise ValueError(
                f"config: {name} must be at least 1; got {getattr(self, name)}"
            )

    def _check_layers(self) -> None:
        """Checks the layers, and stores layers that are all alike as ()."""
        if self.layers and len(self.layers) != self.num_layers:
            raise ValueError(
                f"config: layers must be empty or name all {self.num_layers} layers; "
                f"got {len(self.layers)} entries"
            )
        layers = [self.layer(index) for index in range(self.num_layers)]
        check_keys(layers)
        if self.indexer is not None:
            check_indexed(layers)
        for name in ("experts", "recurrence"):
            if (self.count(name) > 0) != (getattr(self, name) is not None):
                raise ValueError(
                    f"config: {name} must be given if a layer has it, and None if no "
                    f"layer has it; got {getattr(self, name)} and "
                    f"{self.count(name)} such layers"
                )
        for index in range(self.num_layers):
            self._check_heads(index)
        if all(layer == self._plain_layer for layer in layers):
            object.__setattr__(self, "layers", ())

    def _check_heads(self, index: int) -> None:
        """Checks that the config has what heads of a layer's own need."""
        spec, scaling = self.layer(index), self.rope_scaling
        own = spec.heads is not None or spec.keys_of is not None
        if own and (self.latent is not None or self.rotated_dims != self.head_dim):
            raise ValueError(
                f"config: heads and keys_of of layer {index} must be None with latent "
                "attention, or with a rotary_dim below head_dim; got "
                f"{spec.heads} and {spec.keys_of}"
            )
        if spec.heads is not None:
            if self.num_heads % spec.heads.num_kv_heads:
                raise ValueError(
                    "config: num_heads must be a multiple of num_kv_heads; got "
                    f"{self.num_heads} and {spec.heads.num_kv_heads} in layer {index}"
                )
            if self.attention_scale is None and spec.heads.head_dim != self.head_dim:
                raise ValueError(
                    "config: attention_scale must be given where heads have several "
                    f"widths; got None, and {spec.heads.head_dim} in layer {index}"
                )
            if scaling is not None and scaling.kind != "linear":
                raise ValueError(
                    "config: rope_scaling must be linear or None where layers have "
                    f"heads of their own; got {scaling.kind}"
                )

    def _check_scaling(self) -> None:
        """Refuses a scaling that divides by 0 or has tables of a wrong size."""
        scaling, half = self.rope_scaling, self.rotated_dims // 2
        if scaling is None:
            return
        original = scaling.original_length or self.max_length
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        sizes = len(scaling.short_factors), len(scaling.long_factors)
        problem = ""
        if scaling.kind == "longrope" and sizes != (half, half):
            problem = f"must have {half} short and {half} long factors; got {sizes}"
        elif scaling.kind == "longrope" and original < 2:
            problem = f"must have an original length of at least 2; got {original}"
        elif scaling.kind == "llama3" and low >= high:
            problem = (
                f"must have a high_freq_factor above low_freq_factor; got {high:g} and "
                f"{low:g}"
            )
        elif scaling.kind == "yarn" and self.rope_theta <= 1:
            problem = f"must have a rope_theta above 1; got {self.rope_theta:g}"
        elif scaling.kind == "dynamic" and half < 2:
            problem = f"must have at least 4 dims that rotate; got {2 * half}"
        if problem:
            raise ValueError(f"config: rope_scaling of type {scaling.kind} {problem}")

    @property
    def _plain_layer(self) -> LayerSpec:
        return LayerSpec(mlp="dense" if self.experts is None else "experts")

    def layer(self, index: int) -> LayerSpec:
        """The parts of a layer."""
        return self.layers[index] if self.layers else self._plain_layer

    def changed_layers(
        self, change: Callable[[int, LayerSpec], LayerSpec]
    ) -> tuple[LayerSpec, ...]:
        """Every layer as `change` makes it of its number and its parts."""
        return tuple(change(i, self.layer(i)) for i in range(self.num_layers))

    def window(self, layer: int) -> int | None:
        """Sliding-window width of a layer, None for full attention."""
        return self.layer(layer).window

    def layer_experts(self, layer: int) -> MixtureOfExperts | None:
        """Mixture of experts of a layer, None for a layer without."""
        return self.experts if self.layer(layer).has("experts") else None

    @property
    def choice_shape(self) -> tuple[int, int]:
        """Number of layers with experts, and of experts that each gives a token."""
        if self.experts is None:
            raise ValueError(f"routing: {self.model_type} has no experts; use forward")
        found = map(self.layer_experts, range(self.num_layers))
        return sum(map(bool, found)), self.experts.experts_per_token

    def heads(self, layer: int) -> HeadSpec:
        """The heads of a layer of grouped-query attention."""
        own = self.layer(layer).heads
        return HeadSpec(self.head_dim, self.num_kv_heads) if own is None else own

    def kv_heads(self, layer: int) -> int:
        """Number of heads of the keys that a layer reads; 1 with latent attention."""
        return self.heads(layer).num_kv_heads if self.latent is None else 1

    def lends_keys(self, layer: int) -> bool:
        """Whether other layers read a layer's keys and values."""
        return any(spec.keys_of == layer for spec in self.layers)

    def recurrent(self, layer: int) -> Recurrence | None:
        """The recurrence of a layer, None for a layer without."""
        return self.recurrence if self.layer(layer).mixer == "recurrence" else None

    def count(self, part: str) -> int:
        """Number of layers with a part: attention, recurrence, dense or experts."""
        layers = map(self.layer, range(self.num_layers))
        return sum(layer.has(part) for layer in layers)

    @property
    def gated_mlp(self) -> bool:
        """Whether MLPs have a gate."""
        return self.activation != "relu2"

    @property
    def has_states(self) -> bool:
        """Whether layers carry a state along the sequence, next to keys and values."""
        return self.recurrence is not None

    @property
    def indexer(self) -> Indexer | None:
        """The indexer of sparse attention, None without one."""
        return None if self.latent is None else self.latent.indexer

    @property
    def selects(self) -> bool:
        """Whether a sequence may be so long that its queries see chosen keys alone."""
        return self.indexer is not None and self.max_length > self.indexer.top_k

    def within(self, longest: int) -> "ModelConfig":
        """The config for sequences of at most `longest` tokens.

        It is without selection where none of them needs it. Otherwise it is the same.
        """
        indexer = self.indexer
        if indexer is None or not self.selects or longest > indexer.top_k:
            return self
        return replace(self, max_length=indexer.top_k)

    @property
    def meaning_of_length(self) -> str:
        """The name of `max_length`, for messages."""
        indexer = self.indexer
        if indexer is None or self.max_length == indexer.context or self.selects:
            return "context"
        return "context without its indexer (index_topk)"

    @property
    def predicts_tokens(self) -> bool:
        """Whether the head gives logits of the vocabulary."""
        return self.head in ("lm", "lm+value")

    @property
    def rotated_dims(self) -> int:
        """Number of rotated dims per head."""
        if self.latent is not None:
            return self.latent.rope_dim
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores."""
        scale = self.attention_scale
        return self.head_dim**-0.5 if scale is None else scale

    def cache_shape(self, layer: int) -> tuple[int, int, int] | None:
        """Number of heads, key width and value width of a layer's cache.

        None for a layer that keeps no keys. With latent attention the cache has one
        head, whose key is the latent and the rotated key. Values are computed from the
        latent, so in their place are the indexer's keys, or nothing.
        """
        spec, indexer = self.layer(layer), self.indexer
        if not spec.makes_keys:
            return None
        if self.latent is not None:
            beside = 0
            if indexer is not None and self.selects and spec.indexed:
                beside = indexer.head_dim
            return 1, self.latent.kv_rank + self.latent.rope_dim, beside
        heads = self.heads(layer)
        return heads.num_kv_heads, heads.head_dim, heads.head_dim

    @property
    def rotation_limit(self) -> int | None:
        """Length up to which a sequence's rotary angles do not depend on its length.

        Beyond the original context, dynamic and longrope scaling change the angles of
        all tokens, including keys in a cache. None for the other kinds.
        """
        scaling = self.rope_scaling
        if scaling is None or scaling.kind not in ("dynamic", "longrope"):
            return None
        return scaling.original_length or self.max_length

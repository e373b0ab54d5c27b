"""Latent attention: DeepSeek-V2, V3 and V3.2, GLM-4.7-Flash, GLM-5 and Youtu-LLM."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jaxrl_post.models.config import (
    Indexer,
    LatentAttention,
    MixtureOfExperts,
    ModelConfig,
)
from jaxrl_post.models.rope import yarn_mscale
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import glm, llama
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import (
    ATTENTION_BIAS,
    Key,
    fixed,
    option,
    required_experts,
    written,
)
from jaxrl_post.pretrained.families.layers import dense_layers, with_experts
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_values import (
    Json,
    flag,
    integer,
    number,
    optional_flag,
    optional_integer,
    text,
)
from jaxrl_post.pretrained.layout import Weight

__all__ = [
    "DEEPSEEK_V2",
    "DEEPSEEK_V3",
    "DEEPSEEK_V32",
    "GLM4_MOE_LITE",
    "GLM_MOE_DSA",
    "YOUTU",
]

ATTENTION = "model.layers.*.self_attn"
INDEXER = f"{ATTENTION}.indexer"
WEIGHTS: Mapping[str, Weight] = {
    **llama.WEIGHTS,
    **glm.BALANCED_EXPERTS,
    # These replace q_proj if queries have their own latent.
    "layers.*.attention.query_up": Weight(
        f"{ATTENTION}.q_b_proj.weight", "(heads head_dim) rank"
    ),
    "layers.*.attention.query_down": Weight(
        f"{ATTENTION}.q_a_proj.weight", "rank embed"
    ),
    "layers.*.attention.query_norm": Weight(
        f"{ATTENTION}.q_a_layernorm.weight", "norm"
    ),
    "layers.*.attention.query_down_bias": Weight(f"{ATTENTION}.q_a_proj.bias", "rank"),
    "layers.*.attention.kv_down_bias": Weight(
        f"{ATTENTION}.kv_a_proj_with_mqa.bias", "rank"
    ),
    "layers.*.attention.kv_down": Weight(
        f"{ATTENTION}.kv_a_proj_with_mqa.weight", "rank embed"
    ),
    "layers.*.attention.kv_norm": Weight(f"{ATTENTION}.kv_a_layernorm.weight", "norm"),
    "layers.*.attention.kv_up": Weight(
        f"{ATTENTION}.kv_b_proj.weight", "(heads head_dim) rank"
    ),
    "layers.*.attention.output": Weight(
        f"{ATTENTION}.o_proj.weight", "embed (heads head_dim)"
    ),
    "layers.*.attention.indexer.queries": Weight(
        f"{INDEXER}.wq_b.weight", "(heads head_dim) rank"
    ),
    "layers.*.attention.indexer.keys": Weight(f"{INDEXER}.wk.weight", "head_dim embed"),
    "layers.*.attention.indexer.key_norm": Weight(
        f"{INDEXER}.k_norm.weight", "head_dim"
    ),
    "layers.*.attention.indexer.key_norm_bias": Weight(
        f"{INDEXER}.k_norm.bias", "head_dim"
    ),
    "layers.*.attention.indexer.weights": Weight(
        f"{INDEXER}.weights_proj.weight", "heads embed"
    ),
}


LATENT = LatentAttention(
    kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, query_rank=1536
)


def _latent(raw: Json, absent: LatentAttention) -> LatentAttention:
    return LatentAttention(
        kv_rank=integer(raw, "kv_lora_rank", absent.kv_rank),
        nope_dim=integer(raw, "qk_nope_head_dim", absent.nope_dim),
        rope_dim=integer(raw, "qk_rope_head_dim", absent.rope_dim),
        value_dim=integer(raw, "v_head_dim", absent.value_dim),
        # Null means that queries have no latent.
        query_rank=optional_integer(raw, "q_lora_rank", absent.query_rank),
    )


def _with_whole_width(absent: LatentAttention, raw: Json) -> Json:
    """Replaces `head_dim`, which is the width of the rotated part alone."""
    latent = _latent(raw, absent)
    return {**raw, "head_dim": latent.nope_dim + latent.rope_dim}


def _read_latent(
    absent: LatentAttention, raw: Json, config: ModelConfig
) -> ModelConfig:
    scaling, mscale = config.rope_scaling, 1.0
    if scaling is not None and scaling.mscale_all_dim:
        mscale = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return replace(
        config,
        num_kv_heads=config.num_heads,
        attention_scale=None if mscale == 1.0 else config.head_dim**-0.5 * mscale**2,
        latent=_latent(raw, absent),
    )


def _write_latent(config: ModelConfig) -> dict[str, Any]:
    latent = config.latent
    if latent is None:
        raise CheckpointError(
            f"{config.model_type} checkpoints cannot express latent=None"
        )
    return {
        "head_dim": latent.rope_dim,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
    }


def _family(
    architecture: str,
    defaults: Defaults,
    *keys: Key,
    latent: LatentAttention = LATENT,
    **others: Any,
) -> Family:
    """A family with latent attention, whose keys default to `latent`."""
    return Family(
        architecture,
        WEIGHTS,
        defaults,
        keys=(ATTENTION_BIAS, Key(partial(_read_latent, latent), _write_latent), *keys),
        prepare=partial(_with_whole_width, latent),
        **others,
    )


# transformers reads a null `rope_interleave` as false.
INTERLEAVED = option("rope_interleave", optional_flag, True, "rope_interleaved")

YOUTU = _family(
    "Youtu",
    Defaults(max_length=131072, tie_embeddings=True),
    INTERLEAVED,
    classifier=None,
    judges_tokens=False,
)

DEEPSEEK_V3 = _family(
    "DeepseekV3",
    Defaults(max_length=4096),
    INTERLEAVED,
    glm.balanced_experts(
        MixtureOfExperts(256, 8, 2048, scale=2.5, num_groups=8, groups_per_token=4),
        glm.first_dense(3),
    ),
    written(lambda _: {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    ignored=glm.NEXT_TOKEN_LAYERS,
)


GREEDY, GROUPED = "greedy", "group_limited_greedy"


def _read_softmax_experts(raw: Json, config: ModelConfig) -> ModelConfig:
    """V2: softmax scores, never normalised over a token's experts."""
    method = text(raw, "topk_method", GREEDY)
    if method not in (GREEDY, GROUPED):
        raise CheckpointError(
            f"topk_method must be {GREEDY} or {GROUPED}; got {method!r}"
        )
    size = integer(raw, "moe_intermediate_size", 1407)
    experts = MixtureOfExperts(
        num_experts=integer(raw, "n_routed_experts", integer(raw, "num_experts", 64)),
        experts_per_token=integer(raw, "num_experts_per_tok"),
        expert_size=size,
        normalize=False,
        scale=number(raw, "routed_scaling_factor", 1.0),
        num_groups=integer(raw, "n_group") if method == GROUPED else 1,
        groups_per_token=integer(raw, "topk_group") if method == GROUPED else 1,
        shared_size=size * integer(raw, "n_shared_experts", 2),
    )
    return with_experts(config, experts, glm.first_dense(0)(raw, config.num_layers))


def _write_softmax_experts(config: ModelConfig) -> dict[str, Any]:
    experts = required_experts(config)
    return {
        **glm.balanced_to_hf(config),
        "topk_method": GREEDY if experts.num_groups == 1 else GROUPED,
        "scoring_func": "softmax",
    }


DEEPSEEK_V2 = _family(
    "DeepseekV2",
    DEEPSEEK_V3.defaults,
    option("mlp_bias", flag, False, "mlp_bias"),
    Key(_read_softmax_experts, _write_softmax_experts),
    options={"rope_interleaved": True},
    judges_tokens=False,
)


DENSE, SPARSE = "dense", "sparse"


def _by_layer(
    raw: Json, key: str, kinds: Sequence[str], num_layers: int
) -> tuple[int, ...]:
    """Reads the layers of the first kind from a list with a kind for every layer."""
    found = raw[key]
    if (
        not isinstance(found, list)
        or len(found) != num_layers
        or any(kind not in kinds for kind in found)
    ):
        raise CheckpointError(
            f"{key} must name {' or '.join(kinds)} for each of {num_layers} layers; "
            f"got {found}"
        )
    return tuple(layer for layer, kind in enumerate(found) if kind == kinds[0])


def _dense_by_type(absent: glm.DenseLayers) -> glm.DenseLayers:
    """The layers that `mlp_layer_types` names; `absent` without it."""

    def dense(raw: Json, num_layers: int) -> tuple[int, ...]:
        if raw.get("mlp_layer_types") is None:
            return absent(raw, num_layers)
        return _by_layer(raw, "mlp_layer_types", (DENSE, SPARSE), num_layers)

    return dense


def _write_types(config: ModelConfig) -> dict[str, Any]:
    dense = dense_layers(config)
    kinds = [DENSE if i in dense else SPARSE for i in range(config.num_layers)]
    return {"mlp_layer_types": kinds, "topk_method": "noaux_tc"}


GLM4_MOE_LITE = _family(
    "Glm4MoeLite",
    Defaults(max_length=202752, rms_norm_eps=1e-5),
    option("rope_interleave", flag, True, "rope_interleaved"),
    # transformers has the first layer dense, for every `first_k_dense_replace`.
    glm.balanced_experts(
        MixtureOfExperts(64, 4, 1536, scale=1.8), _dense_by_type(lambda *_: (0,))
    ),
    written(_write_types),
    latent=LatentAttention(
        kv_rank=512, nope_dim=192, rope_dim=64, value_dim=256, query_rank=768
    ),
    classifier=None,
    judges_tokens=False,
    ignored=glm.NEXT_TOKEN_LAYERS,
)


SHARED, OWN = "shared", "full"
# The only kind of layer, by transformers' name of today and of earlier releases.
INDEXED = ("indexed_attention", "deepseek_sparse_attention")


def _shared_layers(raw: Json, num_layers: int) -> tuple[int, ...]:
    """Reads the layers without an indexer of their own, as transformers finds them."""
    kinds, pattern = raw.get("indexer_types"), raw.get("index_topk_pattern")
    if kinds is not None:
        return _by_layer(raw, "indexer_types", (SHARED, OWN), num_layers)
    if pattern is not None:
        if isinstance(pattern, str):
            pattern = [{"F": OWN, "S": SHARED}.get(kind, kind) for kind in pattern]
        spelled = {"index_topk_pattern": pattern}
        return _by_layer(spelled, "index_topk_pattern", (SHARED, OWN), num_layers)
    every = integer(raw, "index_topk_freq", 1)
    first = integer(raw, "index_skip_topk_offset", 2)
    layers = range(num_layers)
    return tuple(layer for layer in layers if max(layer - first + 1, 0) % every)


def _indexed(heads: int, *, shares: bool, interleaved: bool) -> Key:
    """The indexer.

    Args:
        heads: default number of heads.
        shares: whether layers may use the choice of a layer before them.
        interleaved: as `Indexer.interleaved`.
    """

    def read(raw: Json, config: ModelConfig) -> ModelConfig:
        latent, context = config.latent, config.max_length
        if latent is None or latent.query_rank is None:
            raise CheckpointError(
                "q_lora_rank must not be null: the indexer reads the queries' latent"
            )
        if raw.get("layer_types") is not None:
            _by_layer(raw, "layer_types", INDEXED, config.num_layers)
        layers = _shared_layers(raw, config.num_layers) if shares else ()
        if 0 in layers:
            raise CheckpointError(
                f"indexer_types must begin with {OWN!r}: no layer comes before the "
                f"first; got layers {layers} as {SHARED!r}"
            )
        indexer = Indexer(
            top_k=integer(raw, "index_topk", 2048),
            num_heads=integer(raw, "index_n_heads", heads),
            head_dim=integer(raw, "index_head_dim", 128),
            context=context,
            interleaved=interleaved,
        )
        return replace(
            config,
            layers=config.changed_layers(
                lambda i, spec: replace(spec, indexed=i not in layers)
            ),
            latent=replace(latent, indexer=indexer),
        )

    def write(config: ModelConfig) -> dict[str, Any]:
        indexer, layers = config.indexer, range(config.num_layers)
        if indexer is None:
            raise CheckpointError(
                f"{config.model_type} checkpoints cannot express indexer=None"
            )
        shared = [not config.layer(layer).indexed for layer in layers]
        kinds = {
            "indexer_types": [SHARED if each else OWN for each in shared],
            "index_topk_pattern": "".join("S" if each else "F" for each in shared),
        }
        return {
            "max_position_embeddings": indexer.context,
            "index_topk": indexer.top_k,
            "index_n_heads": indexer.num_heads,
            "index_head_dim": indexer.head_dim,
            **(kinds if shares else {}),
        }

    return Key(read, write)


def _sparse(
    architecture: str,
    defaults: Defaults,
    experts: MixtureOfExperts,
    latent: LatentAttention,
    heads: int,
    *,
    shares: bool,
    interleaved: bool,
) -> Family:
    """A family whose latent attention is sparse beyond `index_topk` tokens.

    `heads`, `shares` and `interleaved` are of the indexer, as in `_indexed`.
    """
    return _family(
        architecture,
        defaults,
        fixed(
            rope_interleave=True,
            indexer_rope_interleave=interleaved,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
        ),
        glm.balanced_experts(experts, _dense_by_type(glm.first_dense(3))),
        written(_write_types),
        _indexed(heads, shares=shares, interleaved=interleaved),
        latent=latent,
        options={"rope_interleaved": True},
        classifier=None,
        judges_tokens=False,
        ignored=glm.NEXT_TOKEN_LAYERS,
    )


DEEPSEEK_V32 = _sparse(
    "DeepseekV32",
    Defaults(max_length=163840),
    MixtureOfExperts(256, 8, 2048, scale=2.5, num_groups=8, groups_per_token=4),
    LATENT,
    heads=64,
    shares=False,
    interleaved=False,
)
GLM_MOE_DSA = _sparse(
    "GlmMoeDsa",
    Defaults(max_length=202752, rms_norm_eps=1e-5),
    MixtureOfExperts(256, 8, 2048, scale=2.5),
    LatentAttention(
        kv_rank=512, nope_dim=192, rope_dim=64, value_dim=256, query_rank=2048
    ),
    heads=32,
    shares=True,
    interleaved=True,
)

"""Opens the sampler of a program, with sizes from its options."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_post import pretrained
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.kernels.row_tiles import tile_for
from jaxrl_post.learner.memory import SamplerMemory
from jaxrl_post.learner.model import Model, context_of
from jaxrl_post.learner.reference import require_same_ids
from jaxrl_post.models import ModelConfig
from jaxrl_post.models.spec import copied
from jaxrl_post.programs.build.layouts import SamplerLayout
from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler import Draft, Engine, EngineConfig
from jaxrl_post.sampler.jitted import DeviceFunctions
from jaxrl_post.sharding import MeshError, placed, split_size
from jaxrl_post.types import PyTree

__all__ = [
    "bound_engine",
    "cache_dtype",
    "engine_sizes",
    "exact_tile",
    "make_engine",
    "sampler_memory",
]


def bound_engine(model: Model, sizes: EngineConfig, *, seed: int) -> Published:
    """Makes a sampler of a model that is not trained, with its parameters bound.

    Args:
        model: on its mesh.
        sizes: of the sampler.
        seed: of the sampling noise.

    Raises:
        ValueError: the sizes do not fit the model.
    """
    engine = Engine(
        model.config,
        sizes,
        seed=seed,
        dtype=model.dtype,
        mesh=model.mesh,
        rules=model.rules,
        detokenize=model.tokenizer.decode,
    )
    return Published(engine, model.whole(model.params), version=0)


def exact_tile(config: RLConfig) -> int:
    """Rows of a tile of exact mode (`row_tiles.tile_for`); 0 without `--exact`.

    By the slots of the run, not of a device: a run is then the same on any mesh and
    with any number of samplers.
    """
    if not config.exact:
        return 0
    return tile_for(engine_sizes(config.rollout, 1, stop_ids=1).num_slots)


def make_engine(
    rollout: RolloutConfig,
    model: Model,
    weights: SamplerLayout,
    *,
    seed: int,
    exact: int = 0,
    kept_ids: int = 0,
    kernels: Implementation = "auto",
) -> Engine:
    """Makes a sampler with sizes from the configuration.

    Args:
        rollout: how samples are drawn.
        model: architecture and tokenizer; its parameters are not used.
        weights: the sampler's mesh and dtype.
        seed: of the sampling noise.
        exact: as `EngineConfig` has it.
        kept_ids: as `EngineConfig` has it.
        kernels: as `Engine` has it.

    Raises:
        ConfigError: guesses by a draft model with states, or in exact mode for one; a
            layer for multi-token prediction that is not there.
    """
    if exact and rollout.guesses and model.config.has_states:
        raise ConfigError(
            f"--rollout.guesses: layers of {model.config.model_type} carry a state, "
            "which exact mode cannot take back where a guess was wrong; drop "
            "--rollout.guesses or --exact"
        )
    sizes = engine_sizes(
        rollout,
        split_size("batch", weights.mesh, model.rules.with_context_as_batch()),
        stop_ids=len(model.tokenizer.stop_ids),
    )
    sizes = dataclasses.replace(
        sizes,
        kept_ids=kept_ids,
        recompute_cache=rollout.recompute_cache,
        exact=exact,
        experts=rollout.router_replay,
    )
    return Engine(
        model.config,
        sizes,
        seed=seed,
        dtype=cache_dtype(rollout, weights.dtype),
        mesh=weights.mesh,
        rules=model.rules,
        detokenize=model.tokenizer.decode,
        draft=_open_draft(rollout, model, weights, sizes.max_length),
        kernels=kernels,
    )


def sampler_memory(
    rollout: RolloutConfig, model: Model, weights: SamplerLayout, *, versions: int = 1
) -> SamplerMemory:
    """Returns the shapes of the arrays that a run's sampler will keep.

    Args:
        rollout: how samples are drawn.
        model: the trained model, whose parameters may be abstract.
        weights: the sampler's mesh and dtype.
        versions: most versions of the parameters that it has at a time.

    Raises:
        ConfigError, MeshError: as `make_engine`.
    """
    rules, mesh = model.rules.with_context_as_batch(), weights.mesh
    split = split_size("batch", mesh, rules)
    sizes = engine_sizes(rollout, split, stop_ids=len(model.tokenizer.stop_ids))
    dtype = cache_dtype(rollout, weights.dtype)

    def cache(config: ModelConfig, slots: int = 0) -> PyTree:
        functions = DeviceFunctions(
            config, sizes, dtype, mesh, rules, layer_slots=slots
        )
        return placed(functions.pages_shape, functions.pages_shardings)

    draft, slots = _open_draft(rollout, model, weights, sizes.max_length, read=False), 0
    if draft is not None and draft.is_layer:
        slots = DeviceFunctions(model.config, sizes, dtype, mesh, rules).num_states
    return SamplerMemory(
        cache(model.config),
        draft and (draft.params, cache(draft.config, slots)),
        [copied(weights.copies) for _ in range(versions)],
        mesh,
    )


def _open_draft(
    rollout: RolloutConfig,
    model: Model,
    weights: SamplerLayout,
    longest: int,
    *,
    read: bool = True,
) -> Draft | None:
    """Opens what guesses, on the sampler's mesh; abstract without `read`.

    Raises:
        ConfigError: the draft's tokenizer has other ids than the sampled model's, its
            layers carry states, or its context is shorter than the longest sample; or
            the model has no layer for multi-token prediction.
        MeshError: the mesh does not divide it.
    """
    directory = rollout.draft
    layout = {"mesh": weights.mesh, "rules": model.rules, "dtype": weights.dtype}
    if rollout.mtp:
        return _open_layer(model, layout, read=read)
    if directory is None:
        return None
    require_same_ids(directory, model, "--rollout.draft")
    try:
        config, params = pretrained.load(directory, head="lm", weights=read, **layout)
    except MeshError as error:
        raise MeshError(f"--rollout.draft: {error}") from error
    if config.has_states:
        raise ConfigError(
            f"--rollout.draft: layers of {directory}, a {config.model_type}, carry a "
            "state, which a draft cannot take back where a guess was wrong; use a "
            "model whose layers have keys, or drop the option"
        )
    context = context_of(config)
    if context < longest:
        raise ConfigError(
            f"--rollout.draft: {directory} has a context of {context} tokens, shorter "
            f"than a prompt and its completion, {longest}; use a model with a longer "
            "one, or drop the option"
        )
    return Draft(config, params)


def _open_layer(model: Model, layout: dict[str, Any], *, read: bool) -> Draft:
    """Opens the model's layer for multi-token prediction.

    Raises:
        ConfigError: the model is a preset, or its directory holds no such layer.
        MeshError: the mesh does not divide it.
    """
    if model.source is None:
        raise ConfigError(
            f"--rollout.mtp: the layer is read from a model's directory, and "
            f"{model.name} is a preset; drop the option"
        )
    try:
        config, params = pretrained.load_mtp(model.source, weights=read, **layout)
    except pretrained.CheckpointError as error:
        raise ConfigError(f"--rollout.mtp: {error}") from error
    except MeshError as error:
        raise MeshError(f"--rollout.mtp: {error}") from error
    return Draft(config, params)


def cache_dtype(rollout: RolloutConfig, dtype: DTypeLike) -> jnp.dtype:
    """Dtype of the sampler's cache.

    Args:
        rollout: how samples are drawn.
        dtype: of the sampler's parameters.

    >>> cache_dtype(RolloutConfig(cache_dtype="float8"), "bfloat16").name
    'float8_e4m3fn'
    """
    if rollout.cache_dtype == "float8":
        return jnp.dtype(jnp.float8_e4m3fn)
    return jnp.dtype(rollout.cache_dtype or dtype)


def engine_sizes(rollout: RolloutConfig, split: int, *, stop_ids: int) -> EngineConfig:
    """Sizes of a run's sampler.

    Args:
        rollout: how samples are drawn.
        split: parts into which the sampler's mesh splits a batch; the slots fill them.
        stop_ids: number of the tokenizer's stop ids.

    Raises:
        ConfigError: the cache would not hold one sample.

    >>> engine_sizes(RolloutConfig(max_prompt_tokens=64), 16, stop_ids=1).num_slots
    256
    """
    prompts = rollout.prompts_per_step + rollout.partial
    slots = rollout.num_slots or prompts * rollout.samples_per_prompt
    calls = -(-rollout.max_tokens // 32)
    sizes = EngineConfig(
        num_slots=-(-slots // split) * split,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_tokens=rollout.max_tokens,
        steps_per_call=rollout.steps_per_call or -(-rollout.max_tokens // calls),
        max_stop_ids=max(4, stop_ids),
        cache_tokens=rollout.cache_tokens,
        guesses=rollout.guesses,
        guess_rows=rollout.guess_rows,
    )
    if rollout.cache_tokens:
        try:
            sizes.num_pages(split)
        except ValueError as error:
            raise ConfigError(f"--rollout.cache-tokens: {error}") from error
        return sizes
    if rollout.max_turns > 1 or rollout.partial:
        # Samples of a prompt differ in their later turns, and where they were stopped.
        tokens = sizes.cache_for_turns(rollout.max_turns)
    else:
        tokens = sizes.cache_for_groups(rollout.samples_per_prompt, split)
    return dataclasses.replace(sizes, cache_tokens=tokens)

"""Faults of sparse attention: which keys are chosen, and where they are read."""

from tests.mutations.fault import Fault

__all__ = ["SELECTION"]

CHOOSE, ATTEND = "models/selection/choose.py", "models/selection/attend.py"
DECODER = "models/decoder.py"
MODELS, SAMPLER = "models/test_selection.py", "sampler/test_selection.py"

SELECTION = [
    Fault(
        "a key that a query does not see is chosen",
        f"{CHOOSE}::_chosen",
        "key_at[:, None] <= at[:, :, None]",
        "key_at[:, None] <= at[:, :, None] + 1",
        MODELS,
    ),
    Fault(
        "keys of other sequences in a row compete",
        f"{CHOOSE}::_chosen",
        "seen &= at[:, :, None] < ends[:, None]",
        "pass",
        MODELS,
    ),
    Fault(
        "keys that a query does not see fill its choice",
        f"{CHOOSE}::_chosen",
        "jnp.where(best > -jnp.inf, places, NO_KEY)",
        "places",
        MODELS,
    ),
    Fault(
        "scores of the indexer may be negative before they are weighted",
        f"{CHOOSE}::_chosen",
        "jax.nn.relu(products)",
        "products",
        MODELS,
    ),
    Fault(
        "of equal scores the latest is chosen",
        f"{CHOOSE}::_chosen",
        "best, places = jax.lax.top_k(scores, top_k)",
        "best, places = jax.lax.top_k(scores[..., ::-1], top_k);"
        " places = scores.shape[-1] - 1 - places",
        MODELS,
    ),
    Fault(
        "the indexer's keys are not centred",
        f"{CHOOSE}::index_parts",
        "keys - keys.mean(axis=-1, keepdims=True)",
        "keys",
        MODELS,
    ),
    Fault(
        "the indexer rotates as attention does",
        f"{CHOOSE}::index_parts",
        "turned = indexer.interleaved",
        "turned = True",
        MODELS,
    ),
    Fault(
        "the indexer's keys do not rotate",
        f"{CHOOSE}::index_parts",
        "keys = apply_rope(keys, *tables, interleaved=turned)",
        "pass",
        MODELS,
    ),
    Fault(
        "the indexer's queries are made of queries without their norm",
        "models/attention.py::_latent_query",
        "return to_heads(low, up, None, shape), low",
        "return to_heads(low, up, None, shape), project(x, down)",
        MODELS,
    ),
    Fault(
        "in training all keys are seen",
        "models/attention.py::latent_attention",
        "choice = choose_in_rows(index, context.positions, context.ends, rules)",
        "pass",
        MODELS,
    ),
    Fault(
        "with a cache all keys are seen",
        "models/attention.py::latent_attention",
        "choice = choose_in_cache(index, context.positions, entry, rules)",
        "pass",
        SAMPLER,
    ),
    Fault(
        "a layer without an indexer sees all keys",
        f"{DECODER}::_Place.mixed",
        "self.choice",
        "None",
        MODELS,
    ),
    Fault(
        "in a loop over layers the first choice holds for all",
        "models/stack.py::_looped",
        "hidden, entry, one, choice = step(layer, hidden, place)",
        "hidden, entry, one, _ = step(layer, hidden, place)",
        MODELS,
    ),
    Fault(
        "the shared entries come after a sequence's own",
        f"{CHOOSE}::choose_in_cache",
        "keys = jnp.concatenate([before, keys], axis=1)",
        "keys = jnp.concatenate([keys, before], axis=1)",
        SAMPLER,
    ),
    Fault(
        "a sequence that shares nothing chooses among the last group's entries",
        f"{CHOOSE}::choose_in_cache",
        "alone = group >= begins.shape[0]",
        "alone = group < 0",
        f"{MODELS} {SAMPLER}",
    ),
    Fault(
        "chosen entries are read of the first group",
        f"{ATTEND}::_gathered",
        "before.at[group[:, None, None], 0, choice]",
        "before.at[0 * group[:, None, None], 0, choice]",
        SAMPLER,
    ),
    Fault(
        "own entries are read where shared ones would be",
        f"{ATTEND}::_gathered",
        "jnp.maximum(choice - count, 0)",
        "choice",
        MODELS,
    ),
    Fault(
        "places without a chosen entry have weight",
        f"{ATTEND}::attend_in_cache",
        "choice != NO_KEY",
        "choice >= 0",
        MODELS,
    ),
    Fault(
        "the best of the chosen tokens is left out",
        f"{ATTEND}::attend_in_rows",
        "nothing.at[row].set(True, mode='drop')",
        "nothing.at[row[1:]].set(True, mode='drop')",
        MODELS,
    ),
    Fault(
        "a cache of short sequences has the keys of indexers",
        "models/config.py::ModelConfig.cache_shape",
        "indexer is not None and self.selects and spec.indexed",
        "indexer is not None and spec.indexed",
        f"{MODELS} {SAMPLER}",
    ),
    Fault(
        "exact mode samples sequences that need a choice",
        "models/exact/forward.py::check_exact",
        "config.selects and config.indexer is not None",
        "False",
        f"{MODELS} {SAMPLER}",
    ),
    Fault(
        "rows in chunks choose within a chunk",
        f"{DECODER}::_check_chunks",
        "config.selects",
        "False",
        MODELS,
    ),
    Fault(
        "the sampler of short sequences selects",
        "sampler/jitted.py::DeviceFunctions.__post_init__",
        "self.config.within(sizes.max_length)",
        "self.config",
        SAMPLER,
    ),
    Fault(
        "a config for long sequences is one without selection",
        "models/config.py::ModelConfig.within",
        "longest > indexer.top_k",
        "longest > indexer.top_k + 1",
        f"{SAMPLER} learner/test_indexer.py",
    ),
    Fault(
        "with cp a run has the model's whole context",
        "learner/model.py::describe_model",
        "whole, config = config.max_length, config.within(1)",
        "whole = config.max_length",
        "learner/test_indexer.py",
    ),
]

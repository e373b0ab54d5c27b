"""The contract that every public function of the losses keeps.

What does not count may hold anything and reaches neither value nor gradient; values are
float32; jit traces once; vmap, shard_map and packing change nothing.
"""

from collections import Counter
from functools import cache, partial
from pkgutil import walk_packages

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxrl_post import losses
from jaxrl_post.losses import entropy, kl, reduce, whitening
from jaxrl_post.metrics import Metric
from tests.losses.contract import ROWS, batch, example, poisoned
from tests.losses.contract_cases import CASES, EXCEPTIONS, public_names
from tests.tiers import daily

# For the tests of single modules.
__all__ = ["example", "poisoned"]

TRACES = Counter()
# Programs that are compiled here run a few times on small arrays: compiling is what
# takes time.
jit = partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
# Arrays that may be left out, and what that means.
OPTIONAL = {
    "ids": jnp.ones((ROWS, 6), jnp.int32),
    "valid": jnp.ones(ROWS, bool),
    "present": jnp.ones((ROWS, 4), bool),
}
# The first case of each module.
FIRST = {name.partition(".")[0]: name for name in reversed(CASES)}
# Its result has one place a segment and no optional array.
PER_SEGMENT = "sequences.segment_totals"


def over(condition=lambda case: True):
    names = [name for name, case in CASES.items() if condition(case)]
    return pytest.mark.parametrize("name", names)


def is_float(array):
    return array is not None and jnp.issubdtype(array.dtype, jnp.floating)


def arrays_of(case, seed=0):
    every = batch(seed)
    return {name: every[name] for name in case.names}


def kept_of(case, arrays, array):
    """The case's mask in the shape of `array`; None if it says nothing about it."""
    if case.mask is None or array.shape[: arrays[case.mask].ndim] != (
        shape := arrays[case.mask].shape
    ):
        return None
    mask = arrays[case.mask].reshape(*shape, *[1] * (array.ndim - len(shape)))
    return jnp.broadcast_to(mask, array.shape)


def dirty(case, arrays, rotation=0):
    """The arrays with anything at all wherever they do not count."""
    changed = dict(arrays)
    for name, array in arrays.items():
        kept = kept_of(case, arrays, array)
        if kept is not None and is_float(array):
            changed[name] = poisoned([array], kept, rotation)[0]
        elif kept is not None and name in ("tokens", "versions", "sample_lengths"):
            bad = jnp.array(np.resize([-1, 7, 2**30], array.shape), array.dtype)
            changed[name] = jnp.where(kept, array, bad)
    return changed


@cache
def compiled(name):
    """The jitted case: its result, and the gradient in each float array of its sum.

    The entries of the sum have weights, so that no two gradients cancel.
    """
    case = CASES[name]

    def total(floats, others):
        result = case(floats | others)
        rng = np.random.default_rng(9)
        terms = [
            (jnp.array(rng.uniform(0.5, 1.5, leaf.shape), jnp.float32) * leaf).sum()
            for leaf in jax.tree.leaves(result)
            if is_float(leaf)
        ]
        return sum(terms, jnp.zeros((), jnp.float32)), result

    def evaluate(arrays):
        TRACES[name] += 1
        floats = {key: x for key, x in arrays.items() if is_float(x)}
        others = {key: x for key, x in arrays.items() if key not in floats}
        gradients, result = jax.grad(total, has_aux=True)(floats, others)
        return result, gradients

    return jit(evaluate)


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_close(one, other):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), one, other
    )


def assert_finite(tree):
    for leaf in jax.tree.leaves(tree):
        assert jnp.isfinite(leaf).all()


def assert_elsewhere(case, mask, result):
    if case.elsewhere is not None and getattr(result, "shape", None) == mask.shape:
        assert (np.asarray(result)[~np.asarray(mask)] == case.elsewhere).all()


def row(arrays, index):
    return {name: x[index] if x.ndim else x for name, x in arrays.items()}


def summed(tree):
    return jax.tree.map(lambda leaf: leaf.sum(axis=0), tree)


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def test_every_public_function_has_a_case_or_a_reason():
    modules = {
        module.name.rpartition(".")[2]
        for module in walk_packages(losses.__path__, "jaxrl_post.losses.")
        if not module.ispkg
    }
    assert set(losses.__all__) == modules
    covered = {case.public_name for case in CASES.values()}
    assert covered.isdisjoint(EXCEPTIONS)
    assert public_names() == covered | set(EXCEPTIONS)


@over(lambda case: case.covers is None)
def test_arrays_that_do_not_fit_each_other_are_refused_by_name(name):
    """With an axis more, and one less, also where rows and tokens are equally many."""
    case = CASES[name]
    arrays = arrays_of(case)
    rows = min((x.shape[-1] for x in arrays.values() if x.ndim > 1), default=ROWS)
    arrays = {key: x[:rows] if x.ndim else x for key, x in arrays.items()}
    for key, parameter in case.parameters.items() if len(arrays) > 1 else ():
        is_key = jnp.issubdtype(arrays[key].dtype, jax.dtypes.prng_key)
        if is_key or case.names.count(key) > 1:
            continue
        for index in (None, *([(..., 0)] if arrays[key].ndim else [])):
            with pytest.raises(ValueError, match=f": .*\\b{parameter}\\b"):
                jax.eval_shape(case, arrays | {key: arrays[key][index]})


def test_what_the_cases_compose_refuses_shapes_too():
    functions = {
        reduce.with_denominator: (Metric.of(1.0, 1.0), jnp.ones(2)),
        kl.adaptive_coefficient: (jnp.ones(2), 0.5),
        entropy.adaptive_coefficient: (0.5, jnp.ones(2)),
        entropy.gated_coefficient: (jnp.ones(2), 0.5),
        whitening.Moments: (jnp.ones(2), jnp.ones((2, 2), bool)),
    }
    assert functions.keys() == {case.covers for case in CASES.values()} - {None}
    options = {
        kl.adaptive_coefficient: {"target": 0.5, "horizon": 10.0},
        entropy.adaptive_coefficient: {
            "target": 0.5,
            "step": 0.1,
            "low": 0.0,
            "high": 1.0,
        },
        entropy.gated_coefficient: {"target": 0.5},
    }
    for function, arrays in functions.items():
        call = whitening.Moments.of if function is whitening.Moments else function
        with pytest.raises(ValueError, match="must have"):
            call(*arrays, **options.get(function, {}))


@over()
def test_jit_traces_once_for_arrays_of_the_same_shapes(name):
    case, function = CASES[name], compiled(name)
    results = [function(arrays_of(case, seed))[0] for seed in (0, 1)]
    assert TRACES[name] == 1
    for result in results:
        assert_finite(result)
        leaves = jax.tree.leaves(result)
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype(case.dtype)}


@over()
def test_the_gradient_goes_through_what_it_should(name):
    case = CASES[name]
    _, gradients = compiled(name)(arrays_of(case))
    assert_finite(gradients)
    through = {key for key, gradient in gradients.items() if gradient.any()}
    assert case.through is None or through == set(case.through.split())


@over(lambda case: case.mask)
def test_what_does_not_count_reaches_neither_value_nor_gradient(name):
    case, function = CASES[name], compiled(name)
    arrays = arrays_of(case)
    clean = function(arrays)
    assert_elsewhere(case, arrays[case.mask], clean[0])
    for rotation in range(3):
        result, gradients = function(dirty(case, arrays, rotation))
        assert_equal((result, gradients), clean)
        for key, gradient in gradients.items():
            kept = kept_of(case, arrays, arrays[key])
            assert kept is None or not jnp.where(kept, 0.0, gradient).any()


@over(lambda case: case.mask)
def test_nothing_that_counts_gives_finite_numbers(name):
    case = CASES[name]
    arrays = arrays_of(case)
    arrays[case.mask] = jnp.zeros_like(arrays[case.mask])
    result, gradients = compiled(name)(dirty(case, arrays))
    assert_finite((result, gradients))
    assert_elsewhere(case, arrays[case.mask], result)
    if isinstance(result, Metric):
        assert result.sum == result.mean() == 0


@over(lambda case: case.mask)
def test_one_that_counts_gives_finite_numbers(name):
    case = CASES[name]
    arrays = arrays_of(case)
    mask = arrays[case.mask]
    # One of each group, one token of each row, or one pair.
    place = (slice(None), *[0] * (mask.ndim - 1)) if mask.ndim > 1 else 0
    arrays[case.mask] = jnp.zeros_like(mask).at[place].set(True)
    assert_finite(compiled(name)(dirty(case, arrays)))


@over()
def test_equal_numbers_everywhere_give_finite_numbers(name):
    case = CASES[name]
    arrays = {
        key: jnp.full_like(x, -1.0) if is_float(x) and x.ndim else x
        for key, x in arrays_of(case).items()
    }
    if case.mask:
        arrays[case.mask] = jnp.ones_like(arrays[case.mask])
    assert_finite(compiled(name)(arrays))


@over(lambda case: case.mask == "valid" and case.through)
@pytest.mark.parametrize("unlikely", ["chosen", "rejected"])
def test_very_unlikely_responses_give_finite_numbers(name, unlikely):
    arrays = arrays_of(CASES[name])
    far = -1e4 if unlikely == "chosen" else 1e4
    for key, number in (unlikely, -1e4), ("margin", far):
        if key in arrays:
            arrays[key] = jnp.full_like(arrays[key], number)
    assert_finite(compiled(name)(arrays))


@over(lambda case: case.dtype == jnp.float32 and case.nan)
def test_a_nan_that_counts_shows_in_its_own_row(name):
    case = CASES[name]
    arrays = arrays_of(case)
    for key, array in arrays.items():
        kept = jnp.ones(array.shape, bool)
        if case.mask:
            kept = kept_of(case, arrays, array)
        if not is_float(array) or kept is None or not array.ndim:
            continue
        first = (jnp.arange(ROWS) == 0).reshape(-1, *[1] * (array.ndim - 1))
        bad = jnp.where(kept & first, jnp.nan, array)
        result, _ = compiled(name)(arrays | {key: bad})
        shown = jax.tree.map(jnp.isnan, result)
        assert any(leaf.any() for leaf in jax.tree.leaves(shown)), key
        if case.parts == "rows" and not case.of_part:
            assert not shown[1:].any(), key


@over()
def test_float32_out_for_sixteen_bits_in(name):
    case = CASES[name]

    @jit
    def both(arrays):
        def cast(x, dtype):
            return x.astype(dtype) if is_float(x) else x

        results = []
        for dtype in (jnp.bfloat16, jnp.float16):
            low = {key: cast(x, dtype) for key, x in arrays.items()}
            exact = {key: cast(x, jnp.float32) for key, x in low.items()}
            results.append((case(low), case(exact)))
        return results

    for result, exact in both(arrays_of(case)):
        leaves = jax.tree.leaves(result)
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype(case.dtype)}
        assert_equal(result, exact)


@over()
def test_vmap_over_rows_equals_the_batch(name):
    case = CASES[name]
    arrays = arrays_of(case)
    axes = {key: 0 if x.ndim else None for key, x in arrays.items()}

    def one_row(arrays):
        return case(arrays, **case.of_part)

    by_row = jit(jax.vmap(one_row, in_axes=(axes,), axis_name="rows"))(arrays)
    if case.parts == "own":
        alone = jit(case)
        expected = stacked([alone(row(arrays, index)) for index in range(ROWS)])
    else:
        expected, _ = compiled(name)(arrays)
    assert_close(summed(by_row) if case.parts == "sum" else by_row, expected)


@pytest.mark.meshes
# `vmap` guards the others: rows that are on their own there are so on devices too.
@pytest.mark.parametrize("name", daily(CASES, FIRST.values()))
def test_eight_devices_with_a_row_each_equal_the_batch(name):
    case = CASES[name]
    arrays = arrays_of(case)
    specs = {key: PartitionSpec(*["rows"] * (x.ndim > 0)) for key, x in arrays.items()}

    def one_device(arrays):
        result = case(arrays, **case.of_part)
        if case.parts == "sum":
            return jax.lax.psum(result, "rows")
        if case.parts == "own":
            return jax.tree.map(lambda leaf: leaf[None], result)
        return result

    sharded = jax.shard_map(
        one_device,
        mesh=Mesh(np.array(jax.devices()), ("rows",)),
        in_specs=(specs,),
        out_specs=PartitionSpec(*["rows"] * (case.parts != "sum")),
    )
    if case.parts == "own":
        alone = jit(case)
        shards = [row(arrays, np.array([index])) for index in range(ROWS)]
        expected = stacked([alone(shard) for shard in shards])
    else:
        expected, _ = compiled(name)(arrays)
    assert_close(jit(sharded)(arrays), expected)


@over(lambda case: case.parts != "own")
def test_permuting_the_rows_permutes_the_values(name):
    case, function = CASES[name], compiled(name)
    arrays = arrays_of(case)
    order = np.array([5, 2, 7, 0, 3, 6, 1, 4])
    permuted, _ = function(row(arrays, order))
    result, _ = function(arrays)
    assert_close(permuted, result if case.parts == "sum" else result[order])


@over(lambda case: OPTIONAL.keys() & case.names and case.name != PER_SEGMENT)
def test_what_is_left_out_means_everything(name):
    case = CASES[name]
    arrays = arrays_of(case)
    whole = {key: OPTIONAL[key] for key in OPTIONAL.keys() & arrays}
    expected, _ = compiled(name)(arrays | whole)
    result = jit(case)(arrays | dict.fromkeys(whole))
    assert_close(result, expected)


@over(lambda case: "ids" in case.names and case.name != PER_SEGMENT)
def test_packed_equals_unpacked(name):
    case, function = CASES[name], jit(CASES[name])
    arrays = arrays_of(case)
    apart = function(arrays | {"ids": None})
    packed = {
        key: jnp.pad(x.reshape(1, -1), ((0, 0), (0, 3))) if x.ndim else x
        for key, x in arrays.items()
    }
    ids = jnp.repeat(jnp.arange(1, ROWS + 1, dtype=jnp.int32), 6)
    packed["ids"] = jnp.pad(ids[None], ((0, 0), (0, 3)))
    together = function(packed)
    if case.parts != "sum":
        together = together[0, :-3].reshape(ROWS, 6)
    assert_close(together, apart)

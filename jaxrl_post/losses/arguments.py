"""Checks the shapes and kinds of a function's arrays against its annotations.

NumPy's broadcasting pairs axes from the right. Advantages of shape [rows], passed where
[rows, length] is expected, would be paired with the tokens: an error for most shapes,
but a silently wrong loss if rows == length. Functions under `checked` refuse this.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAliasType, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.types import Array, described

__all__ = ["checked"]

_NUMBERS = (bool, int, float, np.generic)
# The dtypes that each annotation accepts; Float accepts integers and bools too.
_KINDS = {
    "Bool": (jnp.bool_,),
    "Int": (jnp.integer,),
    "UInt": (jnp.unsignedinteger,),
    "Float": (jnp.floating, jnp.integer, jnp.bool_),
    "Num": (jnp.floating, jnp.integer),
}
_REMEDIES = {"Bool": "pass `{} != 0`", "Int": "pass `{}.astype(int)`"}


def checked[**Arguments, Result](
    function: Callable[Arguments, Result],
) -> Callable[Arguments, Result]:
    """Decorates a function so that arrays of wrong shape or dtype raise an error.

    An argument annotated `Float[Array, "*batch length"]` must have at least one axis,
    and arguments that name the same dimension must have the same size there. An axis of
    size 1 is not broadcast; only a Python number is, to an array of the expected shape.
    NumPy arrays become JAX arrays. The arrays in a `TokenBatch`, or in another
    annotated record, are checked and passed on as they are.

    Shapes are known when a program is traced, so under `jit` the check costs nothing
    at run time; under `vmap` and `shard_map` it sees the shapes that the function sees.

    Args:
        function: its annotations define the expected shapes and dtypes.

    Returns:
        The function, raising ValueError for wrong shapes, TypeError for wrong dtypes.

    >>> from jaxrl_post.types import Bool, Float
    >>> @checked
    ... def total(values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Array:
    ...     return jnp.where(mask, values, 0.0).sum()
    >>> total(2.0, np.array([True, False, True])).item()
    4.0
    >>> total(jnp.ones(2), jnp.ones((2, 2), bool))
    Traceback (most recent call last):
    ValueError: total: mask must have shape [2] to fit values ...
    """
    signature = inspect.signature(function)
    expected = {
        name: found
        for name, parameter in signature.parameters.items()
        if (found := _expected(parameter.annotation)) is not None
    }
    if not expected:
        raise TypeError(f"{function.__name__} has no annotated array to check")

    @wraps(function)
    def with_checks(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        bound = signature.bind(*args, **kwargs)
        given = {n: v for n, v in bound.arguments.items() if n in expected}
        bound.arguments.update(_fitting(function.__name__, expected, given))
        return function(*bound.args, **bound.kwargs)

    return with_checks


@dataclass(frozen=True)
class _Dims:
    """The expected dtype and dimensions of one array argument.

    Attributes:
        kind: the kind of dtype, as in `types.described`.
        batch: name of the leading axes, whose number is free; None if the number of
            axes is fixed.
        names: names of the axes after the leading ones.
        number: whether a Python number is passed on as it is.
        optional: whether None is passed on.
    """

    kind: str
    batch: str | None
    names: tuple[str, ...]
    number: bool
    optional: bool


# One array, or the arrays of a record by field name.
type _Expected = _Dims | dict[str, _Dims]


@dataclass(frozen=True)
class _Given:
    """An array that was passed, with its name for error messages."""

    name: str
    dims: _Dims
    shape: tuple[int, ...]

    @property
    def num_batch_axes(self) -> int:
        return len(self.shape) - len(self.dims.names)

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Name and size of each dimension; the names of leading axes are numbered."""
        batch = (f"{self.dims.batch} {i}" for i in range(self.num_batch_axes))
        return list(zip((*batch, *self.dims.names), self.shape, strict=True))


def _expected(annotation: Any) -> _Expected | None:
    """Reads what an annotation expects; None if it describes no array."""
    if isinstance(annotation, TypeAliasType):
        annotation = annotation.__value__
    alternatives = (annotation, *get_args(annotation))
    found = next((x for x in map(described, alternatives) if x is not None), None)
    if found is not None and found.kind != "Key":
        first, *rest = found.dims.split() or [""]
        variadic = first.startswith("*")
        return _Dims(
            kind="Num"
            if "Int" in str(annotation) and "Float" in str(annotation)
            else found.kind,
            batch=first[1:] if variadic else None,
            names=tuple(rest if variadic else found.dims.split()),
            number=any(x in (int, float) for x in alternatives),
            optional=type(None) in alternatives,
        )
    if inspect.isclass(annotation) and hasattr(annotation, "__annotations__"):
        fields = get_type_hints(annotation, include_extras=True)
        arrays = {name: _expected(hint) for name, hint in fields.items()}
        return {n: x for n, x in arrays.items() if isinstance(x, _Dims)} or None
    return None


def _fitting(
    function: str, expected: Mapping[str, _Expected], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Converts the arguments to arrays and checks that their shapes match."""
    converted = dict(given)
    arrays, numbers = [], []
    for name, value in given.items():
        dims = expected[name]
        if isinstance(dims, dict):
            arrays += _of_record(function, name, dims, value)
        elif value is None and dims.optional:
            continue
        elif isinstance(value, _NUMBERS):
            if not dims.number:
                numbers.append(_Given(name, dims, ()))
        else:
            converted[name] = array = _array(function, name, dims, value)
            arrays.append(_Given(name, dims, array.shape))
    _check_axes(function, arrays)
    sizes = _check_sizes(function, arrays)
    for number in numbers:
        shape = _shape_of_number(function, number, arrays, sizes)
        value = _array(function, number.name, number.dims, given[number.name])
        converted[number.name] = jnp.broadcast_to(value, shape)
    return converted


def _of_record(
    function: str, name: str, fields: Mapping[str, _Dims], record: Any
) -> list[_Given]:
    """The arrays of a record, each under the name "record.field"."""
    present = {field: getattr(record, field) for field in fields}
    return [
        _Given(
            f"{name}.{field}",
            fields[field],
            _array(function, f"{name}.{field}", fields[field], value).shape,
        )
        for field, value in present.items()
        if not (value is None and fields[field].optional)
    ]


def _array(function: str, name: str, dims: _Dims, value: Any) -> Array:
    """Converts a value to an array and checks the kind of its dtype."""
    if not isinstance(value, (jax.Array, np.ndarray, *_NUMBERS)):
        raise TypeError(
            f"{function}: {name} must be an array or a number; got "
            f"{type(value).__name__}. Pass jnp.asarray({name}), if that makes one"
        )
    array = jnp.asarray(value)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in _KINDS[dims.kind]):
        remedy = _REMEDIES.get(dims.kind, "pass real numbers").format(name)
        raise TypeError(
            f"{function}: {name} must be of dtype {dims.kind.lower()}; got "
            f"{array.dtype}: {remedy}, if that is what it means"
        )
    if dims.kind == "Float" and not jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(jnp.float32)
    return array


def _check_axes(function: str, arrays: Iterable[_Given]) -> None:
    """Raises an error if an array has a wrong number of axes.

    Arrays with the same leading axes must have the same number of them. The most
    frequent number is taken as right; ties go to the first array's.
    """
    arrays = list(arrays)
    batches: dict[str, list[_Given]] = {}
    for array in arrays:
        names, excess = array.dims.names, array.num_batch_axes
        if excess < 0 or (excess > 0 and array.dims.batch is None):
            least = "" if array.dims.batch is None else "at least "
            alike = (
                a for a in arrays if a.dims.names == names and not a.num_batch_axes
            )
            if not least and (model := next(alike, None)):
                raise ValueError(_misfit(function, array, model))
            raise ValueError(
                f"{function}: {array.name} must have {least}{_axes(names)}; got shape "
                f"{_shown(array.shape)}"
            )
        if array.dims.batch is not None:
            batches.setdefault(array.dims.batch, []).append(array)
    for sharing in batches.values():
        number = _most_frequent(array.num_batch_axes for array in sharing)
        fitting = [array for array in sharing if array.num_batch_axes == number]
        wrong = [array for array in sharing if array.num_batch_axes != number]
        if wrong:
            raise ValueError(_misfit(function, wrong[0], fitting[0]))


def _check_sizes(function: str, arrays: Iterable[_Given]) -> dict[str, int]:
    """Returns the most frequent size of each dimension; raises for any other size."""
    by_dimension: dict[str, list[tuple[_Given, int]]] = {}
    for array in arrays:
        for dimension, size in array.sizes:
            by_dimension.setdefault(dimension, []).append((array, size))
    sizes = {}
    for dimension, entries in by_dimension.items():
        sizes[dimension] = _most_frequent(size for _, size in entries)
        wrong = [array for array, size in entries if size != sizes[dimension]]
        if wrong:
            fitting = [a for a, size in entries if size == sizes[dimension]]
            raise ValueError(_misfit(function, wrong[0], fitting[0]))
    return sizes


def _misfit(function: str, wrong: _Given, model: _Given) -> str:
    """The error message for an array whose shape does not match another one."""
    names = wrong.dims.names
    sizes = dict(model.sizes)
    if len(wrong.shape) >= len(names):
        own = wrong.shape[len(wrong.shape) - len(names) :]
        sizes = dict(zip(names, own, strict=True)) | sizes
    expected = (
        *model.shape[: model.num_batch_axes],
        *(sizes[name] for name in names if name in sizes),
    )
    return (
        f"{function}: {wrong.name} must have shape {_shown(expected)} to fit "
        f"{model.name} of shape {_shown(model.shape)}; got {_shown(wrong.shape)}. "
        f"{_remedy(wrong, expected)}"
    )


def _remedy(wrong: _Given, expected: tuple[int, ...]) -> str:
    name, shape = wrong.name, wrong.shape
    missing = len(expected) - len(shape)
    if missing > 0 and shape == expected[: len(shape)]:
        index = ", ".join([":"] * len(shape) + ["None"] * missing)
        return (
            "NumPy would pair its axes with the last ones; where it holds one value "
            f"for all that follows, pass jnp.broadcast_to({name}[{index}], {expected})"
        )
    if missing == -1 and shape == (*expected, 1):
        return f"Pass {name}[..., 0]"
    if missing == 0 and all(s in (1, e) for s, e in zip(shape, expected, strict=True)):
        return f"Where one value stands for all, jnp.broadcast_to({name}, {expected})"
    return "Nothing is broadcast but Python numbers"


def _shape_of_number(
    function: str, number: _Given, arrays: list[_Given], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape to which a number is broadcast."""
    batch = ()
    if number.dims.batch is not None:
        sharing = (a for a in arrays if a.dims.batch == number.dims.batch)
        model = next(sharing, None)
        batch = model.shape[: model.num_batch_axes] if model else ()
    for name in number.dims.names:
        if name not in sizes:
            raise ValueError(
                f"{function}: {number.name} must be an array; no other argument says "
                f"for how many {name} a number would stand"
            )
    return (*batch, *(sizes[name] for name in number.dims.names))


def _most_frequent(values: Iterable[int]) -> int:
    """The value that occurs most often; ties go to the first."""
    return Counter(values).most_common(1)[0][0]


def _axes(names: tuple[str, ...]) -> str:
    if not names:
        return "no axes, a scalar"
    axes = "axis" if len(names) == 1 else "axes"
    return f"{len(names)} {axes}, [{', '.join(names)}]"


def _shown(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"

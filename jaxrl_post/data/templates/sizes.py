"""Bounds on the sizes of a template's values, checked before they are made.

An expression such as `'a' * 10**10` is one step, and takes gigabytes. So each operator,
method, filter and test that may make a large value, or work long on one, first names a
bound of its result. What is known to grow no value is listed; all else counts as if it
might write each of its arguments for each part of its value.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import pass_context
from jinja2.runtime import Context, LoopContext
from jinja2.utils import Namespace

__all__ = ["COMPARED", "MAX_SIZE", "MAX_TOTAL", "REFUSED", "Sizes", "bounded"]

MAX_SIZE = 2**26  # characters or items of a value
MAX_TOTAL = 2**27  # of all values of a rendering
MAX_BITS = 2**14  # of an integer
# Cost of visiting a part of a nested value, in letters, since it takes longer.
VISIT = 64
# Cost of an item of a list, in letters.
ITEM = 8


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Methods whose results are no longer than what they are of and given.
SAME = _named(
    "capitalize casefold count endswith find index isalnum isalpha isascii "
    "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle "
    "isupper lower partition removeprefix removesuffix split splitlines startswith "
    "swapcase title upper"
)
# Functions that may make a list with an item for every two letters. Searching from the
# right, which is not in `SAME`, compares all of both texts.
LISTS = _named("rsplit split splitlines")
# Filters that call another one, or a test, for each item.
EACH = _named("map reject rejectattr select selectattr")
# Methods that no chat needs, and whose cost is hard to tell.
REFUSED = _named("encode decode from_bytes to_bytes maketrans translate")
# Filters that look at a value, or at its items, without writing or comparing them.
SHALLOW = _named(
    "abs attr batch count d default first float int items last length list map "
    "random reject rejectattr reverse select selectattr slice"
)
# Functions whose results are at most several times as long as the value.
LINEAR = _named(
    "capitalize dictsort e escape filesizeformat forceescape groupby lower max min "
    "safe sort string title tojson trim unique upper urlencode wordcount"
)
# Functions whose arguments do not say how often to repeat a text.
UNCOUNTED = _named("int truncate urlize wordwrap")
# Cost of a letter in slow functions.
SLOW = {"pprint": 64, "round": 2**16, "striptags": 64, "urlize": 64, "wordwrap": 64}
# Tests that compare all of a value with all of another.
COMPARISONS = _named("== eq equalto != ne < lt lessthan <= le > gt >= ge in")
COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
NAMED_PLACE = re.compile(r"%\([^()]{0,200}\)")
PERCENT = re.compile(r"%(?:\([^()]{0,200}\))?[-#0 +]*(\d*)(?:\.(\d*))?")
FIELD = re.compile(r"\{[^{}]*:([^{}]*)")
DIGITS = re.compile(r"\d+")


@dataclass
class Sizes:
    """Sizes of the values that a rendering has made so far.

    Attributes:
        total: characters and items.
    """

    total: int = 0

    def take(self, size: int) -> None:
        """Counts a value, or work, of a size.

        Raises:
            TemplateError: it is too large, or all are together.
        """
        self.total += size
        if size > MAX_SIZE or self.total > MAX_TOTAL:
            raise jinja2.TemplateError(
                f"makes more than {MAX_SIZE:,} characters or items at once, or "
                f"{MAX_TOTAL:,} in all"
            )

    def allow(self, size: int) -> None:
        """Raises TemplateError if a value may become larger than one may be."""
        if size > MAX_SIZE:
            raise jinja2.TemplateError(
                f"may make {size:.1e} characters or items at once, more than "
                f"{MAX_SIZE:,}"
            )

    def written(self, value: Any) -> int:
        """Characters of a value when it is written, about; visits all of it."""
        if isinstance(value, str):
            return len(value)
        size, parts = 0, [value]
        # A hostile value has millions of parts: no calls while nothing is too large.
        while parts:
            part = parts.pop()
            if isinstance(part, (str, bytes)):
                size += len(part)
                continue
            self.total += VISIT
            if self.total > MAX_TOTAL:
                self.take(0)
            if isinstance(part, int):
                size += part.bit_length() // 3 + 1
            elif isinstance(part, Namespace):
                parts.append(part._Namespace__attrs)
            elif isinstance(part, Mapping):
                parts += [*part.keys(), *part.values()]
            elif isinstance(part, _CONTAINERS):
                parts += part
            size += 4
            if size + len(parts) > MAX_SIZE:
                self.allow(size + len(parts))
        return size

    def made[Value](self, value: Value) -> Value:
        """Counts a new value, and returns it."""
        if isinstance(value, str):
            self.take(len(value))
        elif isinstance(value, (bytes, list, tuple, dict)):
            self.take(ITEM * len(value))
        elif isinstance(value, int):
            self.number(value)
        return value

    def number(self, value: int) -> None:
        """Raises TemplateError if an integer is too large."""
        if value.bit_length() > MAX_BITS:
            raise jinja2.TemplateError(f"makes an integer of more than {MAX_BITS} bits")

    def operation(self, name: str, left: Any, right: Any) -> None:
        """Raises TemplateError if a binary operator might make a value too large."""
        if isinstance(left, str) and name == "%":
            self.allow(self.filled(left, PERCENT, right))
        elif isinstance(left, int) and isinstance(right, int):
            self.number(left)
            self.number(right)
            if name == "**" and left.bit_length() * abs(right) > MAX_BITS:
                self.number(1 << MAX_BITS)
        elif name == "*":
            times, many = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and isinstance(many, Sized):
                item = 1 if isinstance(many, str) else ITEM
                self.allow(len(many) * abs(times) * item)
        elif name == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            item = 1 if isinstance(left, str) else ITEM
            self.allow((len(left) + len(right)) * item)

    def filled(self, form: str, place: re.Pattern[str], *values: Any) -> int:
        """A bound of the characters of a text with places for values.

        Args:
            form: the text.
            place: matches a place, and its widths as groups.
            values: what may stand in the places.
        """
        if place is FIELD:
            odd = re.search(r"\{[^{}]*[\[{]", form) is not None
        else:
            odd = form.count("%(") != len(NAMED_PLACE.findall(form))
            odd = odd or re.search(r"%[^%a-zA-Z]*\*", form) is not None
        # Any number may be a width then.
        if odd:
            widths = [form]
            numbers = sum(map(_widest, values))
        else:
            widths, numbers = place.findall(form), 0
        size = len(form) + sum(int(n) for n in DIGITS.findall(str(widths)))
        marks = form.count("%") + form.count("{")
        return size + marks * (numbers + sum(map(self.written, values)))

    def call(
        self, called: Any, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        """Raises TemplateError if a call might make a value too large."""
        name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
        given = [*args, *named.values()]
        if name in ("format", "format_map") and hasattr(called, "__wrapped__"):
            self.allow(self.filled(called.__wrapped__.__self__, FIELD, *given))
        elif called is dict or isinstance(owner, LoopContext):
            # They hash or compare what they are given.
            self.written(given)
        elif isinstance(owner, Mapping):
            self.written(given)
        elif isinstance(owner, _SIZED):
            size = self.written(owner)
            if name in LISTS and isinstance(owner, (str, bytes)):
                self.allow(size * ITEM)
            if name in SAME:
                self.allow(size + self.written(given))
            elif name == "replace" and isinstance(owner, str) and len(args) > 1:
                found = owner.count(args[0])
                self.allow(size + found * self.written(args[1]))
            else:
                self.allow((1 + size) * (1 + sum(map(self._counts, given))))

    def filter(
        self, name: str, value: Any, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        """Raises TemplateError if a filter might make a value too large."""
        given = [*args, *named.values()]
        if name in SHALLOW:
            size = len(value) if isinstance(value, Sized) else 1
            if name in EACH or (name == "list" and isinstance(value, (str, bytes))):
                self.take(size * VISIT)
        else:
            size = self.written(value)
        start = named.get("start", args[1] if len(args) > 1 else 0)
        if name == "format":
            size = self.filled(str(value), PERCENT, *given)
        elif name == "sum" and isinstance(start, Sized):
            # Each sum has the one before it as its beginning.
            size *= size
        elif name == "replace" and isinstance(value, str) and len(args) > 1:
            size += value.count(str(args[0])) * self.written(args[1])
        elif name not in ("d", "default") and given:
            count = self.written if name in UNCOUNTED else self._counts
            size = (1 + size) * (1 + sum(map(count, given)))
        elif name not in SHALLOW | LINEAR:
            size *= 8
        self.allow(size * SLOW.get(name, 1))

    def compare(self, left: Any, right: Any) -> None:
        """Raises TemplateError if two values are too large to be compared."""
        if isinstance(left, _PARTS) and isinstance(right, _PARTS):
            self.written([left, right])

    def _counts(self, value: Any) -> int:
        """Bounds how often an argument may have something repeated, or written."""
        return max(_largest(value), self.written(value))


_VIEWS = tuple(type(view) for view in ({}.keys(), {}.values(), {}.items()))
_CONTAINERS = (list, tuple, set, frozenset, range, *_VIEWS)
_PARTS = (Mapping, Namespace, *_CONTAINERS)
_SIZED = (str, bytes, int, float, *_CONTAINERS)


def _largest(value: Any) -> int:
    """The sum of the integers in an argument."""
    if isinstance(value, (list, tuple)):
        return sum(map(_largest, value))
    if isinstance(value, Mapping):
        return sum(map(_largest, value.values()))
    return abs(value) if isinstance(value, int) else 0


def _widest(value: Any) -> int:
    """The sum of the numbers that a value has, or is written with."""
    if isinstance(value, str):
        return sum(map(int, DIGITS.findall(value)))
    if isinstance(value, float):
        return int(min(abs(value), MAX_SIZE + 1))
    if isinstance(value, Namespace):
        return _widest(value._Namespace__attrs)
    if isinstance(value, (list, tuple)):
        return sum(map(_widest, value))
    if isinstance(value, Mapping):
        return sum(map(_widest, value.values()))
    return _largest(value)


def bounded(environment: jinja2.Environment, sizes: Callable[[], Sizes]) -> None:
    """Puts bounds on the filters and tests of an environment.

    Args:
        environment: is changed.
        sizes: returns the present rendering's sizes.
    """
    for name, plain in [*environment.filters.items()]:
        environment.filters[name] = _filter(name, plain, sizes)
    for name in COMPARISONS:
        environment.tests[name] = _test(environment.tests[name], sizes)


def _filter(
    name: str, plain: Callable[..., Any], sizes: Callable[[], Sizes]
) -> Callable[..., Any]:
    # The first argument for which jinja's decorators ask.
    wants = getattr(getattr(plain, "jinja_pass_arg", None), "name", "")

    # A filter that wants the context is not computed while a template is compiled.
    @pass_context
    def filtered(context: Context, value: Any, /, *args: Any, **named: Any) -> Any:
        now = sizes()
        if isinstance(value, Iterator):
            value = now.made(list(value))
        now.filter(name, value, args, named)
        first = {
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
        }
        return now.made(plain(*first.get(wants, ()), value, *args, **named))

    return filtered


def _test(
    plain: Callable[[Any, Any], Any], sizes: Callable[[], Sizes]
) -> Callable[..., Any]:
    @pass_context
    def tested(context: Context, left: Any, right: Any, /) -> Any:
        del context
        sizes().compare(left, right)
        return plain(left, right)

    return tested

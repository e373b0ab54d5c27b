"""Invented people, and where they live."""

from functools import lru_cache
from random import Random

__all__ = ["homes"]

_FIRST = (
    "Ada", "Ben", "Cora", "Dan", "Eva", "Finn", "Greta", "Hugo", "Ida", "Jon",
    "Kim", "Leo", "Mia", "Nils", "Olga", "Paul", "Rosa", "Sam", "Tess", "Uma",
)  # fmt: skip
_LAST = (
    "Ash", "Bell", "Cole", "Dunn", "Ford", "Gray", "Hale", "Jones", "Kent", "Lane",
    "Moss", "Nash", "Park", "Reed", "Stone", "Tarn", "Vale", "Wood", "York", "Zeller",
)  # fmt: skip
_TOWNS = (
    "Bern", "Cork", "Dover", "Essen", "Genoa", "Lima", "Lyon", "Malmo", "Nice", "Oslo",
    "Porto", "Riga", "Split", "Turin", "Utrecht", "Vienna",
)  # fmt: skip


@lru_cache(maxsize=4)
def homes(seed: int) -> tuple[tuple[str, str], ...]:
    """All names and towns, in any order; the same seed gives the same.

    >>> len(homes(0)), homes(0)[0]
    (400, ('Nils Stone', 'Split'))
    """
    rng = Random(f"{seed} homes")
    names = [f"{first} {last}" for first in _FIRST for last in _LAST]
    rng.shuffle(names)
    return tuple((name, rng.choice(_TOWNS)) for name in names)

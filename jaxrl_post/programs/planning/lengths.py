"""Lengths of the answers of a planned step."""

import math

__all__ = ["answer_lengths"]


def answer_lengths(count: int, mean: int, longest: int) -> list[int]:
    """Lengths of answers, one of which is the longest, in a mixed order.

    A share of (1 - t / longest) ** (longest / mean - 1) has more than t tokens. So all
    are of the same length if mean and longest are equal, and the lengths are uniform if
    the longest is twice the mean.

    Args:
        count: of answers, at least 1.
        mean: tokens, at least 1; more than `longest` is taken for it.
        longest: tokens of the longest.

    Returns:
        Tokens of each, at least 1.

    >>> sorted(answer_lengths(5, 50, 100)), answer_lengths(2, 100, 100)
    ([1, 25, 50, 75, 100], [100, 100])
    >>> sum(answer_lengths(1000, 20, 100)) // 1000
    20
    """
    if count == 1 or mean >= longest:
        return [min(mean, longest)] * count
    power = 1 / (longest / mean - 1)
    shares = [1 - (1 - index / (count - 1)) ** power for index in range(count)]
    # A stride without a common factor takes each once, and neighbours far apart.
    stride = round(0.618 * count)
    while math.gcd(stride, count) > 1:
        stride += 1
    return [
        max(1, round(longest * shares[index * stride % count]))
        for index in range(count)
    ]

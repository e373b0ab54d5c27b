"""Formats numbers and durations for the terminal and the report."""

import math

__all__ = ["duration", "number", "percent", "ratio"]

_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def number(value: float) -> str:
    """Writes a number with three significant digits, with k, M, B or T from 10,000 on.

    Args:
        value: any float; `nan`, `inf` and `-inf` are written as such.

    Returns:
        Text of at most ten characters.

    >>> [number(x) for x in (0.0, 0.43217, 12.0, 1843.2, 18432.0, 7.9e10, -2.5e-5)]
    ['0', '0.432', '12', '1843', '18.4k', '79B', '-2.5e-5']
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}" if value else "0"
    magnitude = abs(value)
    if magnitude < 1e-3:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(exponent)}"
    if magnitude < 999.5:
        return f"{value:.3g}"
    if magnitude < 9999.5:
        return f"{value:.0f}"
    if magnitude >= 9.995e14:
        return f"{value:.2e}"
    # 999,960 is written 1M, not 1e+03k: the suffix is chosen after rounding.
    rounded = float(f"{value:.3g}")
    unit, suffix = next(pair for pair in _SUFFIXES if abs(rounded) >= pair[0])
    return f"{rounded / unit:.3g}{suffix}"


def ratio(value: float) -> str:
    """Writes a factor near 1 with four decimals, where three digits would hide it.

    >>> ratio(1.00312)
    '1.0031'
    """
    return f"{value:.4f}" if abs(value) < 1000 else number(value)


def percent(value: float) -> str:
    """Writes a fraction as a percentage with one decimal.

    >>> percent(0.4375)
    '43.8%'
    """
    return f"{100 * value:.1f}%"


def duration(seconds: float) -> str:
    """Writes a length of time in its two largest units.

    Args:
        seconds: >= 0 and finite; below ten seconds one decimal is kept.

    >>> [duration(s) for s in (2.14, 59.0, 62.0, 3723.0, 100_000.0)]
    ['2.1 s', '59 s', '1 min 2 s', '1 h 2 min', '1 d 3 h']
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s" if seconds >= 0.0995 else f"{1000 * seconds:.0f} ms"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"

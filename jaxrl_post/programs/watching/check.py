"""A check before a run, and its result."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Check", "Verdict"]

type Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """A check and its result.

    Attributes:
        name: of the check.
        verdict: "ok"; "warn" for what may be meant; "fail" for a fault.
        told: what was found.
        remedy: what to do; "" for nothing.
    """

    name: str
    verdict: Verdict
    told: str
    remedy: str = ""

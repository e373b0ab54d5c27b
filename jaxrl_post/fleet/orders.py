"""Orders to samplers in other processes, and their news."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxrl_post.sampler.requests import Alternatives, FinishReason, Request
from jaxrl_post.tokens import Tokens

__all__ = ["Grant", "News", "Order", "PolicyVersion", "Progress", "Revoke"]


class PolicyVersion(NamedTuple):
    """A version of the parameters: its number, and the digest of its bytes.

    Versions with the same bytes have the same digest.
    """

    version: int
    digest: str


class Grant(NamedTuple):
    """The order to sample.

    Attributes:
        lease: number of the lease, unique in a run.
        policy: samples all of it.
        job: number of the work to which it belongs; with another one nothing that was
            held of earlier requests is used.
        request: of samples with consecutive indices.
    """

    lease: int
    policy: PolicyVersion
    job: int
    request: Request


class Revoke(NamedTuple):
    """The order to stop samples of a lease."""

    lease: int
    samples: tuple[int, ...]


type Order = Grant | Revoke


class Progress(NamedTuple):
    """The tokens that a sample has sampled since the last news of it.

    Attributes:
        lease: of the sample.
        index: of the sample.
        start: number of tokens that were told under this lease before.
        tokens: the new ones, all sampled by the lease's policy.
        alternatives: of these; None if not asked for.
        finish_reason: None while the sample runs; "cancelled" if the sampler gives it
            back, with the tokens that it has.
        error: of a sample that failed; else "".
        refused: as `Completion.refused`.
    """

    lease: int
    index: int
    start: int
    tokens: Tokens
    alternatives: Alternatives | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    refused: bool = False


class News(NamedTuple):
    """The news of a sampler.

    Attributes:
        number: 1 for the first news after joining, then one more each time.
        doing: the sampler's state, for people.
        ready: digests of the policies by which it can sample now.
        refused: digests of policies that it does not serve, and why.
        progress: of its samples.
        probed: mean absolute differences of its log-probs from the trainer's at the
            probe, in nats, by the digests of the policies that are ready.
    """

    number: int
    doing: str = ""
    ready: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}
    progress: Sequence[Progress] = ()
    probed: Mapping[str, float] = {}

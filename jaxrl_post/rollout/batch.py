"""Turns groups of episodes into advantages and training sequences."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from jaxrl_post.data import packing
from jaxrl_post.losses.credit.returns import turn_returns
from jaxrl_post.rollout.episode import Episode, Group, Turn, players_of

__all__ = [
    "GroupFacts",
    "advantages",
    "is_trained",
    "sequences",
    "turn_advantages",
    "turn_rewards",
    "worthless_if_truncated",
]


def worthless_if_truncated(groups: Sequence[Group]) -> list[Group]:
    """Limits the reward of every truncated turn, and each of its parts, to at most 0.

    A truncated turn earns nothing, regardless of its text, but keeps its penalties.
    """

    def turn(each: Turn) -> Turn:
        if each.reward is None or not each.truncated:
            return each
        rewards = {name: min(0.0, part) for name, part in each.rewards.items()}
        return dataclasses.replace(each, reward=min(0.0, each.reward), rewards=rewards)

    def judged(episode: Episode) -> Episode:
        if not any(each.truncated for each in episode.turns):
            return episode
        return dataclasses.replace(episode, turns=tuple(map(turn, episode.turns)))

    return [
        dataclasses.replace(
            group,
            episodes=tuple(map(judged, group.episodes)),
            greedy=None if group.greedy is None else judged(group.greedy),
        )
        for group in groups
    ]


@dataclass(frozen=True)
class GroupFacts:
    """The input of an advantage estimator: facts about groups of equal size.

    Attributes:
        rewards: float32 [groups, samples], shaped; 0 for failed episodes.
        valid: bool [groups, samples], False for failed episodes.
        lengths: int32 [groups, samples], number of sampled tokens.
        components: float32 [groups, samples, parts], the parts of the rewards in the
            order of their names; None if the estimator reads no parts.
        greedy: float32 [groups], shaped rewards of the greedy completions; None without
            them. If a greedy completion failed, its whole group is invalid.
    """

    rewards: np.ndarray
    valid: np.ndarray
    lengths: np.ndarray
    components: np.ndarray | None
    greedy: np.ndarray | None


def advantages(
    groups: Sequence[Group],
    estimator: Callable[[GroupFacts], np.ndarray],
    shaping: Callable[[np.ndarray], np.ndarray] | None = None,
    parts: Sequence[str] = (),
) -> np.ndarray:
    """Applies a group advantage estimator to the rewards.

    If there are players, it is applied to each player's rewards alone: a player is
    compared with the same player of the group's other samples.

    Args:
        groups: of equal size.
        estimator: `GroupFacts` to advantages [groups, samples].
        shaping: maps the sampled tokens of an episode's longest turn to a term added to
            the reward; the limit of tokens is one of a turn. The term is added only
            here, so that `Group.has_spread` selects groups by their unshaped rewards.
        parts: names of the components that the estimator reads, if any.

    Returns:
        float32 [groups, samples]; the values of failed episodes are not used. With
        players [groups, samples, turns], 0 for missing turns: each turn has its
        player's value.
    """
    if players_of(groups):
        return _by_player(
            groups, lambda own: advantages(own, estimator, shaping, parts)
        )
    rewards = np.stack([group.rewards for group in groups])
    lengths = np.stack([group.lengths for group in groups])
    valid = np.stack([group.valid for group in groups])
    greedy = None
    if any(group.greedy is not None for group in groups):
        greedy, judged = _greedy(groups, shaping)
        valid = valid & judged[:, None]
    facts = GroupFacts(
        rewards=rewards if shaping is None else rewards + shaping(_longest(groups)),
        valid=valid,
        lengths=lengths,
        components=_components(groups, parts) if parts else None,
        greedy=greedy,
    )
    return np.asarray(estimator(facts), np.float32)


def _longest(groups: Sequence[Group]) -> np.ndarray:
    """int32 [groups, samples]: sampled tokens of each episode's longest turn."""
    found = [[episode.longest_turn for episode in group.episodes] for group in groups]
    return np.array(found, np.int32)


def _by_player(
    groups: Sequence[Group], compute: Callable[[Sequence[Group]], np.ndarray]
) -> np.ndarray:
    """Computes values from each player's turns alone, and gives them to these turns.

    Args:
        groups: of equal size, with players.
        compute: from groups without players to values [groups, samples] or [groups,
            samples, turns].

    Returns:
        float32 [groups, samples, turns]; 0 for missing turns.
    """
    samples = len(groups[0].episodes)
    most = max(len(episode.turns) for g in groups for episode in g.episodes)
    values = np.zeros((len(groups), samples, most), np.float32)
    for name in players_of(groups):
        found = compute([group.of_player(name) for group in groups])
        for row, group in enumerate(groups):
            for column, episode in enumerate(group.episodes):
                names = [turn.player for turn in episode.turns]
                own = np.flatnonzero([each == name for each in names])
                by_turn = found[row, column]
                values[row, column, own] = (
                    by_turn if found.ndim == 2 else by_turn[: len(own)]
                )
    return values


def _greedy(
    groups: Sequence[Group], shaping: Callable[[np.ndarray], np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Shaped rewards of the greedy completions, and which of them did not fail."""
    found = [group.greedy for group in groups]
    rewards = np.array([(r and r.reward) or 0.0 for r in found], np.float32)
    if shaping is not None:
        lengths = np.array([r.longest_turn if r else 0 for r in found], np.int32)
        rewards = rewards + shaping(lengths[:, None])[:, 0]
    return rewards, np.array([r is not None and r.reward is not None for r in found])


def _components(groups: Sequence[Group], parts: Sequence[str]) -> np.ndarray:
    """The parts of the rewards, float32 [groups, samples, parts]; 0 if missing."""
    return np.array(
        [
            [[episode.parts.get(name, 0.0) for name in parts] for episode in episodes]
            for episodes in (group.episodes for group in groups)
        ],
        np.float32,
    )


def turn_rewards(
    groups: Sequence[Group],
    shaping: Callable[[np.ndarray], np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The reward of every turn; the shaping of an episode is added to its longest turn.

    Of turns of equal length it is the one that was served last. If there are players,
    each has a shaping, which is added to the player's own longest turn.

    Args:
        groups: of equal size.
        shaping: as for `advantages`.

    Returns:
        Rewards, float32 [groups, samples, turns], and a mask of the turns that exist,
        bool of the same shape. Both are 0 for missing turns and for failed episodes.
    """
    if shaping is not None and players_of(groups):
        _, exist = turn_rewards(groups)
        return _by_player(groups, lambda own: turn_rewards(own, shaping)[0]), exist
    episodes = [episode for group in groups for episode in group.episodes]
    most = max((len(episode.turns) for episode in episodes), default=0)
    rewards = np.zeros((len(episodes), most), np.float32)
    mask = np.zeros((len(episodes), most), np.bool_)
    for row, episode in enumerate(episodes):
        if episode.reward is None:
            continue
        count = len(episode.turns)
        rewards[row, :count] = [turn.reward or 0.0 for turn in episode.turns]
        mask[row, :count] = True
        if shaping is not None:
            turns = episode.turns
            longest = max(
                reversed(episode.order), key=lambda number: len(turns[number].sampled)
            )
            length = np.array([[episode.longest_turn]], np.int32)
            rewards[row, longest] += shaping(length)[0, 0]
    shape = (len(groups), -1, most) if groups else (0, 0, 0)
    return rewards.reshape(shape), mask.reshape(shape)


def turn_advantages(
    groups: Sequence[Group],
    estimator: Callable[[GroupFacts], np.ndarray],
    shaping: Callable[[np.ndarray], np.ndarray] | None = None,
    *,
    discount: float,
) -> np.ndarray:
    """Applies a group advantage estimator to the return of each turn.

    Turn k of a sample is compared with turn k of the group's other samples, as far as
    they have k turns, by the discounted sum of the rewards from turn k on. Turns are
    counted in the order in which they were served, so none is credited with a reward
    that was given before it. If there are players, turns are counted and rewards are
    summed for each player alone.

    Args:
        groups: of equal size.
        estimator: as for `advantages`.
        shaping: as for `advantages`.
        discount: in [0, 1], per turn; 0 credits a turn with its own reward alone.

    Returns:
        float32 [groups, samples, turns]; 0 for missing turns.

    References:
        Zeng et al., Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level
        Credit Assignment, arXiv:2505.11821.
    """
    if players_of(groups):
        return _by_player(
            groups,
            lambda own: turn_advantages(own, estimator, shaping, discount=discount),
        )
    rewards, mask = turn_rewards(groups, shaping)
    order = _orders(groups, rewards.shape[-1])
    rewards = np.take_along_axis(rewards, order, -1)
    mask = np.take_along_axis(mask, order, -1)
    returns = np.asarray(
        turn_returns(jnp.asarray(rewards), jnp.asarray(mask), gamma=discount)
    )
    lengths = np.stack([group.lengths for group in groups])
    values = np.zeros_like(rewards)
    for turn in range(rewards.shape[-1]):
        facts = GroupFacts(returns[..., turn], mask[..., turn], lengths, None, None)
        found = np.asarray(estimator(facts), np.float32)
        values[..., turn] = np.where(mask[..., turn], found, 0.0)
    placed = np.zeros_like(values)
    np.put_along_axis(placed, order, values, -1)
    return placed


def _orders(groups: Sequence[Group], most: int) -> np.ndarray:
    """Numbers of turns in the order of serving, int64 [groups, samples, most].

    Those that an episode does not have come last.
    """
    return np.array(
        [
            [
                [*episode.order, *range(len(episode.turns), most)]
                for episode in group.episodes
            ]
            for group in groups
        ],
        np.int64,
    )


def is_trained(episode: Episode, *, skip_truncated: bool = False) -> bool:
    """Whether the sampled tokens of an episode are trained on.

    Args:
        episode: whose turns were judged, or that failed.
        skip_truncated: as for `sequences`.
    """
    return episode.reward is not None and not (skip_truncated and episode.truncated)


def sequences(
    groups: Sequence[Group],
    values: np.ndarray,
    *,
    rewards: np.ndarray | None = None,
    outcomes: np.ndarray | None = None,
    skip_truncated: bool = False,
    mark_truncated: bool = False,
) -> list[packing.Sequence]:
    """Makes training sequences of episodes that did not fail; of an agent's, several.

    Args:
        groups: as for `advantages`.
        values: advantages, float32 [groups, samples] per episode or [groups, samples,
            turns] per turn; every sampled token gets its episode's or turn's. So the
            sequence of a player has this player's.
        rewards: float32 [groups, samples, turns] for algorithms that compute advantages
            per token; placed at the last token of each turn. None for other algorithms.
        outcomes: float32 [groups, samples], or with players [groups, samples, turns],
            for algorithms that teach a reward model: the `labels` of the sequences,
            which then have `answers` and `groups` too. None for other algorithms.
        skip_truncated: drops the episodes whose last turn was cut (DAPO's overlong
            filter).
        mark_truncated: sets `truncated` of the sequences, each as its own last turn
            was cut; otherwise it is None.
    """
    made, marks = [], _Marks(outcomes)
    for row, group in enumerate(groups):
        for column, episode in enumerate(group.episodes):
            if not is_trained(episode, skip_truncated=skip_truncated):
                continue
            turns = episode.turn_ids
            per_token = _spread(values[row, column], turns)
            placed = None
            if rewards is not None:
                placed = _at_ends(turns, rewards[row, column])
            tokens = episode.tokens
            # Each sequence of an agent or a player ends with a turn of its own.
            ends = (*episode.segments, len(episode.turns))
            for span, end in zip(episode.spans, ends, strict=True):
                last = episode.turns[end - 1]
                made.append(
                    packing.Sequence(
                        tokens=tokens[span],
                        advantages=per_token[span],
                        rewards=None if placed is None else placed[span],
                        truncated=last.truncated if mark_truncated else None,
                        **marks.of(turns[span], row, column, last.player),
                    )
                )
    return made


def _spread(value: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """float32 [tokens]: the episode's value, or the turn's, at each sampled token."""
    if np.ndim(value):
        return np.concatenate([np.zeros(1), value])[turns].astype(np.float32)
    return np.where(turns > 0, value, 0).astype(np.float32)


@dataclass
class _Marks:
    """The outcomes of answers, with numbers of answers and groups, from 1 on.

    Attributes:
        outcomes: as for `sequences`; without them nothing is marked.
    """

    outcomes: np.ndarray | None
    _answers: dict[tuple[int, int, str], int] = field(default_factory=dict, init=False)
    _groups: dict[tuple[int, str], int] = field(default_factory=dict, init=False)

    def of(
        self, turns: np.ndarray, row: int, column: int, player: str
    ) -> dict[str, np.ndarray]:
        """Arrays [tokens] of a sequence of an episode, or of a player in it."""
        if self.outcomes is None:
            return {}
        numbers = {
            "answers": self._answers.setdefault(
                (row, column, player), len(self._answers) + 1
            ),
            "groups": self._groups.setdefault((row, player), len(self._groups) + 1),
        }
        return {"labels": _spread(self.outcomes[row, column], turns)} | {
            name: np.where(turns > 0, number, 0).astype(np.int32)
            for name, number in numbers.items()
        }


def _at_ends(turns: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """float32 [tokens]: each turn's reward at the last token of the turn."""
    placed = np.zeros(len(turns), np.float32)
    for number in range(1, turns.max(initial=0) + 1):
        placed[np.flatnonzero(turns == number)[-1]] = rewards[number - 1]
    return placed

"""Checks of the samples of a small step, and of what is trained on."""

from collections.abc import Iterator
from typing import Any

from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Environment
from jaxrl_post.envs.env import Split
from jaxrl_post.learner.model import context_of
from jaxrl_post.programs.rl import OnlineTrainer
from jaxrl_post.programs.watching.check import Check, Verdict
from jaxrl_post.programs.watching.single_token import TokenGradient
from jaxrl_post.rollout.episode import Episode

__all__ = ["gradient_check", "length_check", "sample_checks"]

# Tasks of each split whose demonstrations are measured.
MEASURED = 32


def sample_checks(
    trainer: OnlineTrainer, metrics: dict[str, Any], *, noise: bool
) -> Iterator[Check]:
    """Checks of the samples of the small step.

    Args:
        trainer: that took it.
        metrics: of the step.
        noise: whether a random model gave the answers, which therefore say nothing.
    """
    tokenizer = trainer.updater.model.tokenizer
    size = trainer.updater.model.config.vocab_size
    highest = max(
        (int(e.tokens.ids.max(initial=0)) for e in _episodes(trainer)), default=0
    )
    known = tokenizer.vocab_size
    yield Check(
        "tokenizer and embeddings",
        "ok" if max(known - 1, highest) < size and tokenizer.stop_ids else "fail",
        f"{known:,} tokens, {size:,} embeddings; answers end with "
        f"{', '.join(map(repr, tokenizer.stop_tokens))}",
        "The tokenizer is of another model, or has no token that ends an answer.",
    )
    yield _round_trips(trainer, tokenizer)
    yield _stops(trainer, tokenizer, metrics, noise=noise)
    factor = metrics.get("mismatch/token_mult_prob_error")
    if factor is not None:
        bound = trainer.config.mismatch.warn
        yield Check(
            "sampler and trainer",
            "ok" if factor <= bound else "fail",
            f"differ by a factor of {factor:.6g} in a token's probability",
            "--dtype float32, --kernels xla and --exact tell the part that differs.",
        )
    audits = {k: v for k, v in metrics.items() if k.startswith("audit/")}
    wrong = [f"{name} {value:.3g}" for name, value in audits.items() if value]
    if audits:
        yield Check(
            "tokens, masks and advantages of the batch",
            "fail" if wrong else "ok",
            ", ".join(wrong) or "equal the samples, token by token",
        )
    reference = trainer.updater.reference
    if reference is not None:
        changed = reference.follow(trainer.updater.state, 1)["reference/changed"]
        yield Check(
            "reference",
            "fail" if changed else "ok",
            "changed with the policy" if changed else "stays as it is in an update",
        )
    spread = metrics.get("rollout/groups_with_spread")
    if spread is not None and not noise:
        yield Check(
            "groups with spread",
            "ok" if spread else "warn",
            f"{spread:.0%} of the groups have rewards that differ",
            "The model always or never solves these tasks, or starts at random: see a "
            "warm start, other tasks, or the grader.",
        )


def _episodes(trainer: OnlineTrainer) -> list[Episode]:
    return [episode for group in trainer.groups for episode in group.episodes]


def _round_trips(trainer: OnlineTrainer, tokenizer: Tokenizer) -> Check:
    """Whether prompts are the same tokens again when their text is tokenised."""
    prompts = [
        each.turns[0].context.ids.tolist() for each in _episodes(trainer) if each.turns
    ]
    prompts = [ids for ids in prompts if ids and min(ids) >= 0]
    texts = [tokenizer.decoded(ids, special=True) for ids in prompts]
    same = [
        list(tokenizer.encode(text, special=True)) == ids
        for text, ids in zip(texts, prompts, strict=True)
    ]
    return Check(
        "round trip of prompts",
        "ok" if all(same) else "warn",
        f"{sum(same)} of {len(same)} have the same tokens again as text",
        "The tokenizer splits a rendered prompt otherwise than its parts: special "
        "tokens in the tasks, or a tokenizer of another version.",
    )


def _stops(
    trainer: OnlineTrainer,
    tokenizer: Tokenizer,
    metrics: dict[str, Any],
    *,
    noise: bool,
) -> Check:
    """Whether answers that stopped end with a stop token, and how many did."""
    turns = [turn for each in _episodes(trainer) for turn in each.turns]
    ended = [turn for turn in turns if turn.finish_reason == "stop"]
    wrong = [t for t in ended if int(t.sampled.ids[-1]) not in tokenizer.stop_ids]
    cut = metrics.get("rollout/truncated_fraction", 0.0)
    return Check(
        "stop tokens",
        "fail" if wrong else "warn" if cut >= 0.5 and not noise else "ok",
        f"{len(ended)} of {len(turns)} answers ended by themselves"
        + (", before the warm start" if noise else "")
        + (f", {len(wrong)} without a stop token" if wrong else ""),
        "Half of the answers and more were cut: raise --rollout.max-tokens, or see "
        "whether the chat template is the model's own.",
    )


def gradient_check(found: TokenGradient | str) -> Check:
    """Whether the gradient of a token is the one of its log-prob.

    Args:
        found: the comparison, or why there is none.
    """
    name = "gradient of a single token"
    if isinstance(found, str):
        return Check(name, "ok", f"not compared: {found}")
    where = f"token {found.place} of a sample"
    if found.right:
        told = f"at {where} it is the direct one of its log-prob times its advantage"
    elif not found.factor:
        told = f"the advantage of {where} reaches no gradient"
    else:
        told = (
            f"at {where} it is not its log-prob's times its advantage: cosine "
            f"{found.cosine:.3f}, length {found.factor / found.expected:.3g} of it"
        )
    return Check(
        name,
        "ok" if found.right else "fail",
        told,
        "An advantage, a mask or a position belongs to another token: see the code "
        "between episodes and the loss, and an --algorithm.name of your own.",
    )


def length_check(trainer: OnlineTrainer, environment: Environment) -> Check:
    """Whether prompts, demonstrations and samples are within the limits.

    Args:
        trainer: that took the step; it has the tasks whose prompts fit.
        environment: has all tasks.
    """
    rollout, model = trainer.config.rollout, trainer.updater.model
    verdict: Verdict = "ok"
    parts = [
        f"prompts of at most {rollout.max_prompt_tokens:,} and answers of "
        f"{rollout.max_tokens:,} tokens, in a context of {context_of(model.config):,}"
    ]
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        every = len(environment.tasks(split))
        dropped = every - len(trainer.experience.environment.tasks(split))
        if dropped:
            parts.append(f"{dropped:,} of {every:,} {split} tasks are left out")
            verdict = "warn" if dropped > every / 10 else verdict
    long, known = _long_demonstrations(environment, model.tokenizer, rollout)
    if long:
        parts.append(f"{long} of {known} demonstrations are longer")
        verdict = "warn"
    episodes = [each for each in _episodes(trainer) if each.turns]
    for reason, limit in (
        ("turn_limit", "--rollout.max-turns"),
        ("token_limit", "--rollout.max-prompt-tokens"),
    ):
        ended = sum(each.finish_reason == reason for each in episodes)
        if ended:
            parts.append(f"{ended} of {len(episodes)} samples ended at {limit}")
            verdict = "warn" if 2 * ended >= len(episodes) else verdict
    return Check(
        "lengths",
        verdict,
        "; ".join(parts),
        "Raise --rollout.max-prompt-tokens, --rollout.max-tokens or "
        "--rollout.max-turns, or leave longer tasks out of the data.",
    )


def _long_demonstrations(
    environment: Environment, tokenizer: Tokenizer, rollout: RolloutConfig
) -> tuple[int, int]:
    """Number of demonstrations that are longer than a turn may be, and of all.

    Demonstrations that call tools are left out.
    """
    tasks = environment.tasks("train")
    shown = (
        environment.demonstration(tasks[at]) for at in range(min(MEASURED, len(tasks)))
    )
    texts = [each for each in shown if isinstance(each, str)]
    # The token that ends an answer counts too.
    sizes = [len(tokenizer.encode(each)) + 1 for each in texts]
    return sum(size > rollout.max_tokens for size in sizes), len(sizes)

"""Two turns through the real sampler: what it said is what the trainer scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.data import packing
from jaxrl_post.envs import WorkerPool
from jaxrl_post.learner.step import Policy, predict
from jaxrl_post.rollout import EpisodeLimits, Group, batch
from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler import Engine, EngineConfig, SamplingParams
from tests import tiny
from tests.rollout.scripts import Characters
from tests.rollout.scripts import collector as make_collector

pytestmark = pytest.mark.processes

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 +=-"
VERSION = 6


class Alphabet(Characters):
    """One of the forty tokens of the tiny model a character."""

    def render(self, messages, tools=()) -> tuple[int, ...]:
        del tools
        return tuple(ALPHABET.index(c) for m in messages for c in m.content)

    def decode(self, tokens) -> str:
        return "".join(ALPHABET[token] for token in tokens).upper()


class Recorded(Published):
    """Remembers what was asked of the sampler."""

    def submit(self, request) -> None:
        self.__dict__.setdefault("requests", []).append(request)
        super().submit(request)


@pytest.fixture(scope="module")
def played(two_turns) -> tuple[list[Group], list]:
    assert len(ALPHABET) == tiny.CONFIG.vocab_size
    environment = two_turns.TwoTurns()
    # Fewer slots than samples: turns of different episodes share the engine.
    sizes = EngineConfig(
        num_slots=4, max_prompt_tokens=32, max_tokens=5, steps_per_call=2
    )
    engine = Engine(tiny.CONFIG, sizes, seed=1)
    sampler = Recorded(engine, tiny.shared(), VERSION, 0)
    with WorkerPool(environment) as judges:
        limits = EpisodeLimits(max_turns=2, max_prompt_tokens=32)
        collector = make_collector(Alphabet(), judges, limits)
        numbered = [(i, environment.tasks("train")[i]) for i in range(3)]
        sampling = SamplingParams(temperature=0.7, max_tokens=5, stop_ids=(4, 9))
        groups = collector.run(sampler, numbered, 3, sampling)
    return groups, sampler.requests


def test_prompts_continue_what_was_sampled(played):
    groups, requests = played
    prompts = {(r.prompt_id, r.first_sample): r.prompt for r in requests[3:]}
    assert len(prompts) == 9
    for group in groups:
        for episode in group.episodes:
            assert episode.reward == 4.25
            prompt = prompts[episode.prompt_id, episode.sample_index]
            ids, mask = episode.tokens.ids.tolist(), episode.tokens.sampled
            assert tuple(ids[: len(prompt)]) == prompt
            # task i= | sampled | again i= | sampled: four runs.
            assert np.flatnonzero(np.diff(mask)).size == 3
            text = "".join(ALPHABET[t] for t in ids)
            start = len(f"task {episode.task_id}=")
            assert text[:start] == f"task {episode.task_id}="
            reply = f" again {episode.task_id}="
            assert text[: len(prompt)].endswith(reply)
            assert not mask[len(prompt) - len(reply) : len(prompt)].any()
            assert mask[len(prompt) :].all()
            assert mask[start : len(prompt) - len(reply)].all()
            assert set(episode.tokens.versions[mask]) == {VERSION}


def test_the_trainer_scores_every_turn_as_the_sampler_did(played):
    groups, _ = played
    values = np.ones((3, 3), np.float32)
    packed = packing.pack(batch.sequences(groups, values), 48, 1)
    scored = jax.jit(predict, static_argnums=0)(
        Policy(tiny.CONFIG, temperature=0.7),
        tiny.shared(),
        jax.tree.map(jnp.asarray, packed),
    )
    mask = packed.loss_mask
    assert mask.sum() == sum(r.num_sampled for g in groups for r in g.episodes)
    np.testing.assert_allclose(
        np.asarray(scored.logprobs)[mask], packed.behavior_logprobs[mask], atol=1e-4
    )
    # Log-probabilities that differ from token to token, so that a shift would show.
    assert np.std(packed.behavior_logprobs[mask]) > 0.1

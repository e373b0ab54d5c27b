"""With `few_shapes` any traffic is served by few programs, with the same samples."""

import dataclasses
import random

import numpy as np
import pytest

from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sampler.batches import prefill_calls
from jaxrl_post.sampler.jitted import shared_functions
from jaxrl_post.sampler.scheduler import Scheduler
from jaxrl_post.tokens import Tokens
from tests import tiny

CONTEXT = 2048
SERVER = EngineConfig(
    num_slots=64,
    max_prompt_tokens=CONTEXT - 1,
    max_tokens=CONTEXT - 1,
    context_tokens=CONTEXT,
    cache_tokens=64 * 1024,
    few_shapes=True,
)


def traffic(sizes: EngineConfig, bursts: int, seed: int):
    """Shapes of the calls that a server's mixed requests need: decoding, prefill.

    Between 1 and 128 samples are wanted at a time. Prompts of 4 to 1,500 tokens, 4 in
    10 after a system message, 3 in 10 after an earlier conversation; 1 to 16 samples
    of 1 to about 1,000 tokens each; some truncate, some ask for alternatives.
    """
    rng = random.Random(seed)
    scheduler = Scheduler(sizes)
    system = tuple(rng.randrange(100) for _ in range(200))
    ended: list[tuple[int, ...]] = []
    decoding, prefill = set(), set()
    wanted = prompts = done = unfinished = 0
    while done < bursts:
        if done % 20 == 0:
            wanted = rng.choice([1, 2, 8, 16, 64, 128])
        while unfinished < wanted:
            length = int(min(1500, max(4, rng.lognormvariate(4.5, 1.2))))
            tokens = tuple(rng.randrange(100) for _ in range(length))
            kind = rng.random()
            if kind < 0.4:
                tokens = system + tokens
            elif kind < 0.7 and ended:
                tokens = ended[rng.randrange(len(ended))] + tokens[:100]
            tokens = tokens[: CONTEXT - 100]
            most = min(int(rng.lognormvariate(4.5, 1)) + 1, CONTEXT - len(tokens))
            sampling = SamplingParams(
                max_tokens=most,
                top_p=rng.choice([1.0, 1.0, 0.9]),
                alternatives=rng.random() < 0.05,
            )
            samples = rng.choices([1, 2, 4, 8, 16], [80, 8, 6, 4, 2])[0]
            scheduler.submit(Request(prompts, tokens, samples, sampling=sampling))
            prompts += 1
            unfinished += samples
        for rows, _ in prefill_calls(scheduler.prefill(), sizes, 1):
            shared = rows.shared and rows.shared.pages.shape
            prefill.add((rows.tokens.shape, shared))
        burst = scheduler.burst()
        if burst is None:
            continue
        done += 1
        decoding.add(
            (
                burst.slots,
                burst.num_groups,
                burst.members,
                burst.shared_pages,
                burst.own_pages,
                burst.truncate,
                burst.alternatives,
            )
        )
        for sample in [s for part in burst.rows for s in part]:
            count = min(sizes.steps_per_call, sample.remaining)
            ids = np.asarray([rng.randrange(100) for _ in range(count)], np.int32)
            tokens = Tokens.generated(ids, np.zeros(count, np.float32), version=0)
            scheduler.advance(sample, tokens)
            if not sample.remaining or rng.random() < 0.1:
                said = (*sample.request.prompt, *sample.tokens.ids.tolist())
                ended = [*ended[-50:], said]
                scheduler.release(sample)
                unfinished -= 1
    return decoding, prefill


def test_a_server_compiles_few_programs():
    """Bounded by arithmetic, and far below what finer shapes need."""
    decoding, prefill = traffic(SERVER, 300, seed=0)
    slots, _, members, shared, own, _, _ = map(set, zip(*decoding, strict=True))
    assert slots <= {8, 16, 32, 64}
    assert members <= {1, 8}
    # A group's prompt may take partly filled pages beyond the context.
    assert shared <= {4, 16, 64, 136, 256}
    assert own <= {4, 16, 64, 128}
    assert len({shape[:3] for shape in decoding}) <= 2 * len(slots)
    assert len({shape[5:] for shape in decoding}) <= 3
    assert len(decoding) < 60
    assert len(prefill) < 45
    finer, _ = traffic(dataclasses.replace(SERVER, few_shapes=False), 300, seed=0)
    assert len(finer) > 2 * len(decoding)


def test_a_burst_holds_what_it_needs():
    """Padded sizes are never below those that were asked for."""
    for pages in range(1, 700):
        assert SERVER.shared_pages(pages) >= pages
    for tokens in range(0, CONTEXT - SERVER.steps_per_call, 13):
        assert 16 * SERVER.own_pages(tokens) >= tokens + SERVER.steps_per_call
    for slots in SERVER.batch_sizes():
        for needed in range(1, slots + 1):
            assert (SERVER.groups(needed, slots, 1) or 0) >= needed
            groups = SERVER.groups(needed, slots, 8)
            assert groups is None or groups >= needed


SMALL = EngineConfig(
    num_slots=16,
    max_prompt_tokens=40,
    max_tokens=12,
    steps_per_call=4,
    prefill_tokens=64,
    max_stop_ids=2,
)


def requests():
    rng = np.random.default_rng(3)
    drawn = [SamplingParams(max_tokens=m) for m in (12, 5, 9)]
    drawn += [SamplingParams(0.0, max_tokens=7), SamplingParams(max_tokens=8, top_k=3)]
    drawn += [SamplingParams(max_tokens=6, alternatives=True)]
    for index, sampling in enumerate([*drawn, *drawn]):
        length = int(rng.integers(1, 40))
        prompt = tuple(rng.integers(0, tiny.CONFIG.vocab_size, length).tolist())
        samples = (1, 3, 1, 2, 1, 5)[index % 6]
        yield Request(index, prompt, samples, sampling=sampling)


@pytest.fixture(scope="module")
def both():
    shared_functions.cache_clear()
    params, engines, found = tiny.shared(), [], []
    for few in (False, True):
        sizes = dataclasses.replace(SMALL, few_shapes=few)
        engine = Engine(tiny.CONFIG, sizes, seed=5)
        found.append(engine.generate(params, list(requests())))
        engines.append(engine)
    return engines, found


def test_samples_are_the_same(both):
    _, (tight, few) = both
    assert [c.tokens.ids.tolist() for c in few] == [
        c.tokens.ids.tolist() for c in tight
    ]
    for one, other in zip(tight, few, strict=True):
        np.testing.assert_allclose(
            one.tokens.logprobs, other.tokens.logprobs, atol=2e-5
        )
        np.testing.assert_allclose(
            one.tokens.log_masses, other.tokens.log_masses, atol=2e-5
        )
        assert (one.alternatives is None) == (other.alternatives is None)
        if one.alternatives is not None and other.alternatives is not None:
            assert (one.alternatives.ids == other.alternatives.ids).all()


def test_fewer_programs_are_compiled(both):
    (tight, few), _ = both
    assert few.compilations["decode"] < tight.compilations["decode"]

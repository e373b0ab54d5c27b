"""The tree of cached segments: what is found, kept, promised and evicted."""

import random

from jaxrl_post.sampler.prefixes import PrefixTree
from jaxrl_post.sampler.sizes import PAGE, pages_for


def held(tree, tokens, *, path=None, own=()):
    """Places a context as the scheduler does, fully computed, with sampled tokens."""
    path = tree.match(tokens) if path is None else path
    tree.pin(path)
    have = sum(count for _, count in path)
    if tokens[have:]:
        rest = tree.begin(path, tokens[have:], pages_for(len(tokens) - have))
        tree.grow(rest, len(tokens) - have)
        rest.computed = len(tokens) - have
        path = (*path, (rest, rest.computed))
    sampled = tree.begin(path, (), pages_for(len(own) + 1))
    tree.grow(sampled, len(own))
    sampled.tokens, sampled.computed = list(own), len(own)
    return (*path, (sampled, len(own)))


def counts(path):
    return [count for _, count in path]


def test_a_prompt_is_found_whole_and_in_part():
    tree = PrefixTree(20)
    first = held(tree, list(range(40)))
    assert counts(tree.match(list(range(40)))) == [40]
    assert counts(tree.match([*range(40), 7, 8])) == [40]
    assert counts(tree.match([*range(20), 7, 8])) == [20]
    # Less than a page of a segment is not worth a page to read.
    assert tree.match([*range(PAGE - 1), 99]) == ()
    assert tree.match([99]) == ()
    assert tree.free == 20 - 3
    # A second prompt stores only what is new, in a page of its own.
    second = held(tree, [*range(20), *range(100, 110)])
    assert counts(second) == [20, 10, 0]
    assert second[0][0] is first[0][0]
    assert (second[1][0].start, second[1][0].offset) == (20, 20)
    assert tree.free == 20 - 3 - 1


def test_a_conversation_is_found_through_what_was_sampled():
    tree = PrefixTree(20)
    prompt, answer, reply = list(range(10)), list(range(50, 60)), list(range(90, 95))
    turn = held(tree, prompt, own=answer[:-1])
    tree.unpin(turn)
    # The key of an answer's last token has not been computed.
    path = tree.match([*prompt, *answer, *reply])
    assert counts(path) == [10, 9]
    assert counts(held(tree, [*prompt, *answer, *reply])) == [10, 9, 6, 0]


def test_a_segment_that_is_being_computed_is_found():
    tree = PrefixTree(20)
    segment = tree.begin((), range(40), promise=3)
    assert counts(tree.match(list(range(40)))) == [40]
    tree.grow(segment, PAGE)
    segment.computed = PAGE
    # Its sample is cancelled: what has been computed stays.
    tree.unpin(((segment, 0),))
    assert counts(tree.match(list(range(40)))) == [PAGE]
    assert (tree.free, tree.promised) == (19, 0)


def test_new_parameters_leave_nothing_to_find():
    tree = PrefixTree(20)
    idle = held(tree, list(range(20)))
    tree.unpin(idle)
    running = held(tree, list(range(100, 120)))
    tree.forget()
    assert tree.match(list(range(20))) == tree.match(list(range(100, 120))) == ()
    assert tree.free == 20 - 2  # what runs stays until it ends
    tree.unpin(running)
    assert (tree.free, tree.room()) == (20, 20)


def test_the_least_recently_used_goes_first_and_leaves_before_their_parents():
    tree = PrefixTree(6)
    old = held(tree, list(range(16)), own=list(range(200, 216)))
    tree.unpin(old)
    tree.unpin(held(tree, list(range(100, 116))))
    tree.unpin(held(tree, list(range(16))))  # used again
    assert tree.free == 3
    big = held(tree, list(range(300, 364)))
    # The sampled tokens were used least recently, though their prompt was not.
    assert counts(tree.match([*range(16), *range(200, 216)])) == [16]
    assert counts(tree.match(list(range(100, 116)))) == [16]
    tree.unpin(big)
    held(tree, list(range(400, 416)))
    assert tree.match(list(range(100, 116))) == ()
    assert counts(tree.match(list(range(16)))) == [16]


def test_laws_under_random_traffic():
    """Pages are held once, promises are kept, and what is found spells the tokens."""
    for seed in range(20):
        rng, tree = random.Random(seed), PrefixTree(40)
        running, contexts = [], [[rng.randrange(3) for _ in range(rng.randint(1, 60))]]
        for _ in range(150):
            action = rng.random()
            if action < 0.5:
                begin = rng.choice(contexts)
                tokens = begin[: rng.randint(1, len(begin))]
                tokens += [rng.randrange(3) for _ in range(rng.randint(0, 30))]
                path = tree.match(tokens)
                spelled = [t for s, count in path for t in s.tokens[:count]]
                assert spelled == tokens[: len(spelled)]
                at = 0
                for segment, count in path:
                    assert segment.start == at
                    assert segment.current
                    at += count
                own = [rng.randrange(3) for _ in range(rng.randint(0, 40))]
                needed = pages_for(len(tokens) - at) + pages_for(len(own) + 1)
                if needed <= tree.room(path):
                    running.append(held(tree, tokens, path=path, own=own))
                    contexts.append([*tokens, *own])
            elif action < 0.95 and running:
                tree.unpin(running.pop(rng.randrange(len(running))))
            elif action > 0.98:
                tree.forget()
            pinned = {segment for path in running for segment, _ in path}
            pages = [page for segment in pinned for page in segment.pages]
            assert len(set(pages)) == len(pages)
            assert not set(pages) & set(tree._free)
            assert tree.promised == sum(segment.promised for segment in pinned)
            assert tree.room() == 40 - len(pages) - tree.promised >= 0
        for path in running:
            tree.unpin(path)
        tree.forget()
        assert tree.free == tree.room() == 40

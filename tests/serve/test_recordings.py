"""The tree of an episode, without a model: prompts, branches, what is trained on."""

import random

import numpy as np
import pytest

from jaxrl_post.data import chat
from jaxrl_post.envs import Message, Step, Task
from jaxrl_post.envs.workers.interface import Judgement
from jaxrl_post.rollout import Group
from jaxrl_post.rollout.batch import turn_advantages
from jaxrl_post.serve.agents import _episode
from jaxrl_post.serve.recordings import EndedError, Recording
from jaxrl_post.tokens import Tokens
from tests.serve.conftest import make_tokenizer
from tests.serve.test_episodes import FORGETS

OPTIONS = chat.Options()


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def begin(recording, tokenizer, messages, options, player="", count=1):
    return recording.find(tokenizer, messages, options, player)(count)


def served(recording, tokenizer, messages, text, *, stop=True):
    """A call that is answered with `text`; its prompt and its sampled ids."""
    begun = begin(recording, tokenizer, messages, OPTIONS)
    ids = [*tokenizer.encode(text), *([tokenizer.stop_ids[0]] if stop else [])]
    tokens = Tokens.generated(ids, [-0.5] * len(ids), version=len(recording.turns))
    recording.add(begun, tokens, said(text), "stop" if stop else "length")
    return begun, ids


def written(tokenizer, ids):
    return tokenizer.backend.decode(list(ids), skip_special_tokens=False)


@pytest.mark.parametrize("stop", [True, False])
def test_the_next_prompt_is_what_the_template_writes(tokenizer, stop):
    recording = Recording("one")
    first, ids = served(recording, tokenizer, [user("a")], "b", stop=stop)
    messages = [user("a"), said("b"), user("c")]
    second, _ = served(recording, tokenizer, messages, "d")
    # The stop token stands there once, sampled or as context.
    assert written(tokenizer, second.prompt) == chat.render_text(tokenizer, messages)
    assert second.prompt[: len(first.prompt) + len(ids)] == (*first.prompt, *ids)


@pytest.mark.parametrize("stop", [True, False])
def test_a_template_that_forgets_is_bridged(stop):
    tokenizer = make_tokenizer(FORGETS)
    recording = Recording("one")
    served(recording, tokenizer, [user("a")], "<think>b</think>c", stop=stop)
    messages = [user("a"), said("<think>b</think>c"), user("d")]
    second, _ = served(recording, tokenizer, messages, "e")
    assert second.kind == "bridged"
    assert written(tokenizer, second.prompt) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>b</think>c"
        "<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_shows_no_end_begins_a_segment(tokenizer):
    hidden = make_tokenizer(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}"
        "{% endfor %}<|im_end|>"
    )
    recording = Recording("one")
    served(recording, hidden, [user("a")], "b")
    second, _ = served(recording, hidden, [user("a"), said("b"), user("c")], "d")
    assert second.kind == "unbridged"
    assert second.parent is None
    assert written(hidden, second.prompt) == "ac<|im_end|>"
    del tokenizer


def test_random_agents_train_each_turn_once(tokenizer):
    draw = random.Random(0)
    for episode in range(30):
        recording = Recording(str(episode))
        conversations = [[user("begin")]]
        for number in range(draw.randrange(1, 8)):
            messages = draw.choice(conversations)
            begun, ids = served(recording, tokenizer, messages, f"answer {number}")
            path = recording.path(number).tokens
            assert tuple(path.ids[: len(begun.prompt)]) == begun.prompt
            assert path.ids[len(begun.prompt) :].tolist() == ids
            extended = [*messages, said(f"answer {number}")]
            conversations.append([*extended, user(f"question {draw.randrange(3)}")])
        branches = recording.branches()
        for number, turn in enumerate(recording.turns):
            found = [np.flatnonzero(branch.turns == number) for branch in branches]
            assert sorted(map(len, found)) == [0] * (len(branches) - 1) + [
                len(turn.sampled)
            ]
        for branch in branches:
            np.testing.assert_array_equal(branch.turns >= 0, branch.tokens.sampled)
            text = written(tokenizer, branch.tokens.ids)
            # No message is lost or repeated on the way.
            assert text.startswith("<|im_start|>user\nbegin<|im_end|>")
            assert text.count("<|im_start|>user") == text.count("answer")


def test_random_agents_of_token_ids_train_each_turn_once():
    draw = random.Random(0)
    for episode in range(60):
        recording, known = Recording(str(episode)), [(1,)]
        for number in range(draw.randrange(1, 9)):
            # Served or sent tokens, cut anywhere and continued otherwise.
            before = draw.choice(known)
            prompt = before[: draw.randint(1, len(before))]
            prompt += tuple(draw.choices(range(3), k=draw.randrange(3)))
            begun = recording.begin_tokens(prompt)
            ids = draw.choices(range(3), k=draw.randint(1, 3))
            sampled = Tokens.generated(ids, [-0.5] * len(ids), version=0)
            assert recording.add(begun, sampled, None, "stop") == number
            # The prompt is what was asked, with what was sampled in it at its place.
            path = recording.path(number)
            assert tuple(path.tokens.ids.tolist()) == (*prompt, *ids)
            at = begun.parent
            end = len(prompt)
            while at is not None:
                turn = recording.turns[at]
                [places] = np.nonzero(path.turns == at)
                assert path.tokens.ids[places].tolist() == turn.sampled.ids.tolist()
                assert places.max() < end
                end, at = places.min(), turn.parent
            # No other turn reaches further into the prompt.
            whole = [tuple(recording.path(n).tokens.ids) for n in range(number)]
            reach = [len(w) for w in whole if prompt[: len(w)] == w]
            parent = begun.parent
            assert max(reach, default=0) == (
                0 if parent is None else len(whole[parent])
            )
            known += [prompt, (*prompt, *ids)]
        branches = recording.branches()
        for branch in branches:
            np.testing.assert_array_equal(branch.turns >= 0, branch.tokens.sampled)
        for number, turn in enumerate(recording.turns):
            counts = sorted(int((b.turns == number).sum()) for b in branches)
            assert counts == [0] * (len(branches) - 1) + [len(turn.sampled)]


def test_space_around_an_answer_and_reasoning_do_not_matter(tokenizer):
    recording = Recording("one")
    served(recording, tokenizer, [user("a")], " b\n")
    back = {"role": "assistant", "content": "b", "reasoning_content": "why"}
    begun = begin(recording, tokenizer, [user("a"), back, user("c")], OPTIONS)
    assert begun.kind == "bridged"


def test_the_longest_conversation_is_continued(tokenizer):
    recording = Recording("one")
    served(recording, tokenizer, [user("a")], "b")
    served(recording, tokenizer, [user("a"), said("b"), user("c")], "d")
    messages = [user("a"), said("b"), user("c"), said("d"), user("e")]
    assert begin(recording, tokenizer, messages, OPTIONS).parent == 1


def test_a_turn_keeps_what_its_parent_had_not_heard(tokenizer):
    recording = Recording("one")
    served(recording, tokenizer, [user("a")], "b")
    for question in ("c", "d"):
        messages = [user("a"), said("b"), user(question), user("!")]
        served(recording, tokenizer, messages, "e")
    served(recording, tokenizer, [user("a"), said("edited"), user("c")], "f")
    first, one, other, anew = recording.turns
    assert first.heard == (user("a"),)
    assert one.heard == (user("c"), user("!"))
    assert other.heard == (user("d"), user("!"))
    assert anew.heard == (user("a"), said("edited"), user("c"))
    assert [turn.answer for turn in recording.turns] == [
        said(text) for text in ("b", "e", "e", "f")
    ]


def test_the_noise_of_calls_does_not_depend_on_which_came_first(tokenizer):
    def noises(texts):
        recording = Recording("one", seed=3)
        begun = [begin(recording, tokenizer, [user(t)], OPTIONS) for t in texts]
        return list(map(recording.noise, begun))

    one, two, three = noises("abc")
    assert noises("cab") == [three, one, two]
    # A prompt that comes again has other noise, and the same in each order.
    first, _, again = noises("aba")
    assert len({first, again, two}) == 3
    assert noises("baa")[1:] == [first, again]


def test_turns_are_reserved_when_a_call_begins(tokenizer):
    recording = Recording("one", most_turns=3)
    begun = begin(recording, tokenizer, [user("a")], OPTIONS, count=2)
    with pytest.raises(EndedError, match=r"0 of its 3 turns, 2 are running, and .* 2"):
        begin(recording, tokenizer, [user("b")], OPTIONS, count=2)
    served(recording, tokenizer, [user("b")], "c")
    recording.add(begun, Tokens.context([1]), said("d"), "stop")
    # The other answer of the first call is still to come.
    with pytest.raises(EndedError, match="2 of its 3 turns, 1 are running"):
        begin(recording, tokenizer, [user("a")], OPTIONS)
    recording.drop(begun)
    recording.drop(begun)
    served(recording, tokenizer, [user("a")], "e")
    with pytest.raises(EndedError, match=r"has had its 3 turns \(--rollout.max-turns"):
        begin(recording, tokenizer, [user("a")], OPTIONS)


def test_a_message_of_another_name_is_another_message():
    named = make_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.role }}"
        "{% if m.name and m.role == 'user' %} {{ m.name }}{% endif %}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    recording = Recording("one")
    alice, bob = ({**user("a"), "name": name} for name in ("alice", "bob"))
    served(recording, named, [alice], "b")
    other = begin(recording, named, [bob, said("b"), user("c")], OPTIONS)
    assert other.parent is None
    assert "user bob" in written(named, other.prompt)
    assert "alice" not in written(named, other.prompt)
    # Many frameworks name the agent in what it said.
    back = {**said("b"), "name": "agent"}
    assert begin(recording, named, [alice, back, user("c")], OPTIONS).parent == 0


def test_an_episode_that_has_ended_takes_nothing(tokenizer):
    recording = Recording("one")
    begun = begin(recording, tokenizer, [user("a")], OPTIONS)
    recording.end("done")
    recording.end("again")
    assert recording.ended == "done"
    with pytest.raises(EndedError, match="episode one has ended: done"):
        begin(recording, tokenizer, [user("a")], OPTIONS)
    with pytest.raises(EndedError):
        recording.add(begun, Tokens.context(()), said("b"), "stop")
    with pytest.raises(EndedError):
        recording.credit(1.0)


def test_an_episode_keeps_the_order_in_which_turns_were_served(tokenizer):
    recording = Recording("one")
    plans, codes = [user("plan")], [user("code")]
    for number, messages in enumerate((plans, codes, plans, codes)):
        served(recording, tokenizer, messages, str(number))
        messages += [said(str(number)), user("go on")]
    recording.credit(1.0, 1)
    task = Task(0, (Message("user", "q"),), "")
    outcome = Judgement(Step(0.5, done=True), None, "ok", 0.0)
    episode = _episode((0, 0), task, recording, outcome, tokenizer.decode)
    # The conversations are sequences, one after the other.
    assert [turn.text for turn in episode.turns] == ["0", "2", "1", "3"]
    assert [episode.turns[n].text for n in episode.order] == ["0", "1", "2", "3"]
    # The reward of the whole came when all turns had been served.
    assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 1.0, 0.5]

    def returns(facts):
        return facts.rewards

    values = turn_advantages([Group(0, (episode,))], returns, discount=1.0)
    np.testing.assert_allclose(values[0, 0], [1.5, 0.5, 1.5, 0.5])


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_is_finite(reward):
    with pytest.raises(ValueError, match="reward: must be finite"):
        Recording("one").credit(reward)


def by(recording, tokenizer, player, messages, text):
    """A call of a player that is answered with `text`."""
    begun = begin(recording, tokenizer, messages, OPTIONS, player)
    ids = [*tokenizer.encode(text), tokenizer.stop_ids[0]]
    tokens = Tokens.generated(ids, [-0.5] * len(ids), version=0)
    recording.add(begun, tokens, said(text), "stop")
    return begun


def test_players_that_say_the_same_have_conversations_of_their_own(tokenizer):
    recording = Recording("one", seed=3)
    messages = [user("a"), said("b"), user("c")]
    begun = [
        by(recording, tokenizer, "x", messages[:1], "b"),
        by(recording, tokenizer, "y", messages[:1], "b"),
        by(recording, tokenizer, "x", messages, "d"),
        by(recording, tokenizer, "y", messages, "d"),
        # It has no player: this continues none.
        by(recording, tokenizer, "", messages, "d"),
    ]
    kinds = ["first", "first", "bridged", "bridged", "first"]
    assert [each.kind for each in begun] == kinds
    assert [turn.parent for turn in recording.turns] == [None, None, 0, 1, None]
    assert [turn.player for turn in recording.turns] == ["x", "y", "x", "y", ""]
    branches = recording.branches()
    numbers = [set(branch.turns[branch.turns >= 0].tolist()) for branch in branches]
    assert numbers == [{0, 2}, {1, 3}, {4}]
    rows = recording.to_json()["turns"]
    assert [row.get("player") for row in rows] == ["x", "y", "x", "y", None]
    # The noise is the player's own, in every order of calls.
    assert len({recording.noise(each) for each in begun}) == 5
    assert [each.number for each in begun] == [0, 0, 0, 0, 0]


def test_a_players_reward_is_its_last_turns(tokenizer):
    recording = Recording("one")
    for player in ("x", "y", "x", "y"):
        by(recording, tokenizer, player, [user("a")], "b")
    recording.credit(1.0, player="x")
    recording.credit(0.5, 0, player="x")
    recording.credit(-1.0, player="y")
    assert recording.rewards == {2: 1.0, 0: 0.5, 3: -1.0}
    assert recording.reward == 0
    with pytest.raises(ValueError, match=r"the turns of x are \[0, 2\]; got 1"):
        recording.credit(1.0, 1, player="x")
    with pytest.raises(ValueError, match="z has no turn yet in episode one"):
        recording.credit(1.0, player="z")


def test_a_recording_keeps_no_prompt_as_a_whole():
    """Calls are numbered by a digest of their prompts: 3,000 tokens take 96 KB."""
    recording = Recording("one", seed=1)
    prompts = [tuple(range(1000, 4000)), tuple(range(1000, 3999)), (5,)]
    begun = [recording.begin_tokens(prompt) for prompt in (*prompts, *prompts)]
    assert [each.number for each in begun] == [0, 0, 0, 1, 1, 1]
    assert recording.begin_tokens((5,), player="white").number == 0
    noise = [recording.noise(each) for each in begun]
    assert len(set(noise)) == 6
    for each in begun:
        recording.drop(each)
    assert sum(len(digest) for _, digest in recording.prompts) == 4 * 32

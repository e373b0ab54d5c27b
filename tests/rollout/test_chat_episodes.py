"""Episodes under chat templates: their tokens are those that transformers renders."""

import concurrent.futures
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.data import chat, learned
from jaxrl_post.data.codec import Codec
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Message, Step, Task
from jaxrl_post.envs.workers.pool import Judgement
from jaxrl_post.rollout import Episode, EpisodeLimits
from jaxrl_post.rollout import flight as flights
from jaxrl_post.rollout.batch import sequences
from jaxrl_post.rollout.episode import Group
from jaxrl_post.sampler.requests import (
    Completion,
    FinishReason,
    Request,
    SampleId,
    SamplingParams,
)
from tests.rollout.scripts import collector as make_collector
from tests.rollout.scripts import sampled

PARITY = Path(__file__).parents[1] / "parity"
CHATS = json.loads((PARITY / "fixtures" / "chat.json").read_text(encoding="utf-8"))
NOW = datetime.datetime.fromisoformat(CHATS["now"])
ASK, FOUR, AGAIN, SIX = (
    Message(turn["role"], turn["content"])
    for turn in CHATS["conversations"]["two turns"]
)
# Each with the stop tokens of such a model; an answer ends with the first, or, where
# the next turn's head ends it, with the first of those.
STOPS = {
    "chatml": ("<|im_end|>", "</s>"),
    "qwen2_5": ("<|im_end|>", "</s>"),
    "llama2": ("</s>", "<|end|>"),
    "llama3_1": ("<|eot_id|>", "</s>"),
    "mistral": ("</s>", "<|end|>"),
    "gemma": ("<end_of_turn>", "</s>"),
    "phi3": ("<|end|>", "</s>", "<|assistant|>"),
    "glm": ("<|user|>", "</s>", "<|observation|>"),
    "deepseek": ("</s>", "<|end|>"),
    "qwen3": ("<|im_end|>", "</s>"),
}
# Its prompt opens a thought that the history leaves out.
FORGETS_ITS_PROMPT = "deepseek"
# It drops the reasoning of earlier turns.
REWRITES = "qwen3"
REPRODUCED = [name for name in STOPS if name not in (FORGETS_ITS_PROMPT, REWRITES)]


def tokenizer_of(template: str) -> Tokenizer:
    file = PARITY / "chat_templates" / f"{template}.jinja"
    backend = tokenizers.Tokenizer.from_str(json.dumps(CHATS["tokenizer"]))
    return Tokenizer(
        backend,
        stop_ids=[backend.token_to_id(stop) for stop in STOPS[template]],
        # The template that asks for the date gets the fixture's.
        chat_template=file.read_text(encoding="utf-8").replace(
            'strftime_now("%d %b %Y")', f'"{NOW:%d %b %Y}"'
        ),
        special_tokens=CHATS["special_tokens"],
    )


@dataclass
class Scripted:
    """A sampler that says what it was told to, turn by turn."""

    turns: Sequence[Completion]
    requests: list[Request] = field(default_factory=list)
    said: int = 0

    @property
    def busy(self) -> bool:
        return len(self.requests) > self.said

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def dispatch(self) -> None:
        pass

    def settle(self) -> list[Completion]:
        raise NotImplementedError

    def cancel(self, samples: object = None) -> list[Completion]:
        raise NotImplementedError

    def collect(self) -> list[Completion]:
        if not self.busy:
            return []
        self.said += 1
        return [self.turns[self.said - 1]]


@dataclass(frozen=True)
class Asking:
    """Asks something after every turn but the last; judges at once."""

    turns: int
    question: Message = AGAIN

    def submit(
        self, task: Task, conversation: tuple[Message, ...], session: SampleId
    ) -> concurrent.futures.Future[Judgement]:
        del task, session
        said = sum(message.role == "assistant" for message in conversation)
        future: concurrent.futures.Future[Judgement] = concurrent.futures.Future()
        step = Step(0.5, done=said == self.turns, messages=(self.question,))
        future.set_result(Judgement(step, None, "ok", 0.0))
        return future

    def end(self, session: SampleId) -> None:
        del session


def turn(tokens: Sequence[int], reason: FinishReason = "stop") -> Completion:
    return Completion(3, 0, sampled(tokens), reason)


def play(
    tokenizer: Tokenizer,
    *turns: Completion,
    longest: int = 9999,
    question: Message = AGAIN,
) -> tuple[Episode, list[Request]]:
    sampler = Scripted(turns)
    limits = EpisodeLimits(max_turns=len(turns), max_prompt_tokens=longest)
    judges = Asking(len(turns), question)
    collector = make_collector(Codec(tokenizer), judges, limits, deadline_s=60.0)
    task = Task(0, (ASK,), "")
    [group] = collector.run(sampler, [(3, task)], 1, SamplingParams())
    return group.episodes[0], sampler.requests


def ids(episode: Episode) -> list[int]:
    return episode.tokens.ids.tolist()


def sampled_runs(
    tokenizer: Tokenizer, answers: Sequence[str]
) -> tuple[list[int], list[bool], list[list[int]]]:
    """Tokens and mask of the whole conversation, and what was sampled turn by turn."""
    first, second = (Message("assistant", answer) for answer in answers)
    [(tokens, mask)] = learned.conversation(tokenizer, [ASK, first, AGAIN, second])
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    runs = [tokens[begin:end].tolist() for begin, end in edges.reshape(-1, 2)]
    assert len(runs) == 2
    return tokens.tolist(), mask.tolist(), runs


def agree(episode: Episode, tokens: list[int], mask: list[bool]) -> None:
    """The episode is the conversation, up to what no turn has: its very end."""
    shared = min(len(tokens), len(episode.tokens))
    assert ids(episode)[:shared] == tokens[:shared]
    assert episode.tokens.sampled[:shared].tolist() == mask[:shared]
    assert not any(mask[shared:])
    assert len(episode.tokens) - shared <= 1


@pytest.mark.parametrize("template", REPRODUCED)
def test_two_turns_are_what_transformers_renders(template):
    [expected] = [
        case["ids"]
        for case in CHATS["cases"]
        if case["template"] == template
        and case["conversation"] == "two turns"
        and not case.get("add_generation_prompt")
        and not case.get("mask")
    ]
    tokenizer = tokenizer_of(template)
    tokens, mask, runs = sampled_runs(tokenizer, ["4", "6"])
    # Where the head of a turn ends the one before it, the last is given that token.
    added = [tokenizer.eos_id] if template == "glm" else []
    assert tokens == expected + added
    episode, requests = play(tokenizer, *map(turn, runs))
    agree(episode, tokens, mask)
    # Every stop token was sampled, so every one is learned.
    assert [run[-1] for run in runs] == [tokenizer.eos_id] * 2
    assert episode.num_sampled == sum(map(len, runs))
    ends = [
        i
        for i, token in enumerate(ids(episode))
        if episode.tokens.sampled[i] and token == tokenizer.eos_id
    ]
    assert len(ends) == 2
    # The sampler's prompts are prefixes of the whole.
    for request in requests:
        assert tuple(ids(episode)[: len(request.prompt)]) == request.prompt
    assert requests[0].prompt == Codec(tokenizer).render([ASK])


TOKENIZERS = {template: tokenizer_of(template) for template in REPRODUCED}
ANSWERS = st.text(alphabet="ab1 \n.<>é🙂", min_size=1, max_size=12).filter(str.strip)
ENDINGS = ("stop", "another stop", "stop_string", "length")


@pytest.mark.parametrize("template", REPRODUCED)
@settings(max_examples=40, deadline=None)
@given(st.tuples(ANSWERS, ANSWERS), st.sampled_from(ENDINGS))
def test_any_two_turns_are_the_conversation_however_they_ended(
    template, answers, ending
):
    tokenizer = TOKENIZERS[template]
    tokens, mask, (first, second) = sampled_runs(tokenizer, answers)
    end = mask.index(True) + len(first) - 1
    assert tokens[end] == tokenizer.eos_id
    if ending == "another stop":
        first = [*first[:-1], tokenizer.stop_ids[1]]
        # It stays where it was sampled, and the template's follows it as context.
        tokens.insert(end, first[-1])
        mask.insert(end + 1, False)
    elif ending != "stop":
        first = first[:-1]
        # The end of the turn is there, as context.
        mask[end] = False
    reason = "stop" if ending == "another stop" else ending
    episode, requests = play(tokenizer, turn(first, reason), turn(second))
    agree(episode, tokens, mask)
    trained = episode.tokens.ids[episode.tokens.sampled]
    assert trained.tolist() == [*first, *second]
    assert list(requests[1].prompt) == ids(episode)[: len(requests[1].prompt)]


def test_a_history_that_forgets_the_prompt_goes_on_from_what_was_sampled():
    tokenizer = tokenizer_of(FORGETS_ITS_PROMPT)
    said = [*tokenizer.encode("2, 2\n</think>\n\n4"), tokenizer.eos_id]
    episode, requests = play(tokenizer, turn(said), turn(said))
    text = tokenizer.backend.decode(ids(episode), skip_special_tokens=False)
    user, assistant = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
    answer = f"{assistant}<think>\n2, 2\n</think>\n\n4</s>"
    expected = f"{user}{ASK.content}{answer}{user}{AGAIN.content}{answer}"
    assert text.strip().removeprefix("<s>") == expected
    assert requests[1].prompt[: len(requests[0].prompt)] == requests[0].prompt


def test_a_stop_token_that_is_not_special_is_no_part_of_the_text():
    backend = tokenizers.Tokenizer.from_str(json.dumps(CHATS["tokenizer"]))
    backend.add_tokens(["<stop>"])
    template = "{% for m in messages %}{{ m.content }}<stop>{% endfor %}"
    stop = backend.token_to_id("<stop>")
    tokenizer = Tokenizer(backend, stop_ids=(stop,), chat_template=template)
    assert tokenizer.decode([stop]) == "<stop>"
    said = [*tokenizer.encode("4"), stop]
    episode, _ = play(tokenizer, turn(said), turn(said))
    text = tokenizer.backend.decode(ids(episode), skip_special_tokens=False)
    assert text == f"{ASK.content}<stop>4<stop>{AGAIN.content}<stop>4<stop>"
    assert episode.response_text == "4"


def test_the_end_of_a_cut_turn_counts_for_the_longest_prompt():
    tokenizer = TOKENIZERS["gemma"]
    _, _, (first, second) = sampled_runs(tokenizer, ["4", "6"])
    cut = turn(first[:-1], "length")
    episode, requests = play(tokenizer, cut, turn(second))
    longest = len(requests[1].prompt)
    assert play(tokenizer, cut, turn(second), longest=longest)[0] == episode
    short, asked = play(tokenizer, cut, turn(second), longest=longest - 1)
    assert len(asked) == 1
    # Nothing follows the last turn: what was not sampled is not there.
    assert short.tokens[-len(cut.tokens) :] == cut.tokens
    assert (short.reward, short.finish_reason) == (0.5, "token_limit")


def test_a_reply_that_nobody_will_read_is_not_rendered():
    """A template may rewrite turns as long as no further one follows."""
    tokenizer = tokenizer_of("chatml")
    forgetful = Tokenizer(
        tokenizer.backend,
        stop_ids=tokenizer.stop_ids,
        chat_template="{{ messages | length }}{% for m in messages %}{{ m.content }}"
        "<|im_end|>{% endfor %}",
    )
    said = [*tokenizer.encode("4"), tokenizer.eos_id]
    episode, _ = play(forgetful, turn(said))
    assert episode.reward == 0.5


def test_a_template_that_rewrites_turns_makes_a_sequence_of_each():
    """The next prompt is the template's, without the earlier reasoning."""
    tokenizer = tokenizer_of(REWRITES)
    said = [
        [
            *tokenizer.encode(f"<think>\n{thought}\n</think>\n\n{answer}"),
            tokenizer.eos_id,
        ]
        for thought, answer in (("2, 2", "4"), ("3, 3", "6"), ("4, 4", "8"))
    ]
    episode, requests = play(tokenizer, *map(turn, said))
    assert episode.segments == (1, 2)
    assert episode.parents == [None, 0, 1]
    answers = [Message("assistant", "4"), Message("assistant", "6")]
    rows = [ASK, answers[0], AGAIN, answers[1], AGAIN]
    prompts = [chat.render(tokenizer, rows[:size]) for size in (1, 3, 5)]
    assert [request.prompt for request in requests] == prompts
    assert episode.reward == 1.5
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, said, strict=True)]
    assert [ids(episode)[span] for span in episode.spans] == whole
    made = sequences([Group(3, (episode,))], np.ones((1, 1), np.float32))
    assert [each.ids.tolist() for each in made] == whole
    trained = [each.ids[each.loss_mask].tolist() for each in made]
    assert trained == said


def test_the_longest_prompt_counts_one_sequence_alone():
    tokenizer = tokenizer_of(REWRITES)
    said = [*tokenizer.encode("<think>\n2, 2\n</think>\n\n4"), tokenizer.eos_id]
    turns = turn(said), turn(said)
    _, requests = play(tokenizer, *turns)
    longest = len(requests[1].prompt)
    assert longest < len(requests[0].prompt) + len(said) + longest
    assert len(play(tokenizer, *turns, longest=longest)[1]) == 2
    short, asked = play(tokenizer, *turns, longest=longest - 1)
    assert len(asked) == 1
    assert (short.finish_reason, short.segments) == ("token_limit", ())


def test_a_flight_that_begins_anew_is_restored():
    task, step = Task(0, (ASK,), ""), Step(0.5, done=False, messages=(AGAIN,))
    limits = EpisodeLimits(max_turns=2, max_prompt_tokens=9)
    flight = flights.begin(3, 0, task, [1, 2])
    flight, _ = flights.transition(
        flight, flights.Generated(sampled([5, 6]), "4", "stop"), limits
    )
    flight, effect = flights.transition(
        flight, flights.Answered(step, (7, 8, 9), anew=True), limits
    )
    assert effect == flights.Generate((7, 8, 9))
    again = flights.Flight.from_json(json.loads(json.dumps(flight.to_json())), task)
    assert flights.effect_of(again) == effect
    # No sequence of its own before there is something to learn in it.
    assert [ids(again.episode)[span] for span in again.episode.spans] == [[1, 2, 5, 6]]
    more = flights.Generated(sampled([4]), "6", "stop")
    ended, _ = flights.transition(again, more, limits)
    found = [ids(ended.episode)[span] for span in ended.episode.spans]
    assert found == [[1, 2, 5, 6], [7, 8, 9, 4]]


def test_a_reply_that_has_no_tokens_fails_its_episode_alone():
    """The environment may quote what the policy said."""
    backend = tokenizer_of("chatml").backend
    embeddings = backend.get_vocab_size()
    backend.add_special_tokens(["<image>"])
    tokenizer = tokenizer_of("chatml")
    small = Tokenizer(
        backend,
        stop_ids=tokenizer.stop_ids,
        chat_template=tokenizer.chat_templates,
        special_tokens=tokenizer.special_tokens,
        num_embeddings=embeddings,
    )
    said = [*tokenizer.encode("4"), tokenizer.eos_id]
    quoted = Message("user", "you said <image>")
    episode, _ = play(small, turn(said), turn(said), question=quoted)
    assert episode.reward is None
    assert episode.finish_reason == "failed"
    assert episode.error.startswith("reply: tokenizer: ")

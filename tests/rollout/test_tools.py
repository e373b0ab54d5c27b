"""Episodes with tools, by the tokens: what was sampled is trained on, what a tool said
is not."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data import chat
from jaxrl_post.data.codec import Codec
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Message, WorkerPool, make
from jaxrl_post.envs.tasks.lookup import lookup
from jaxrl_post.envs.tools import Functions, ToolEnvironment
from jaxrl_post.examples.demonstrations import Demonstrations
from jaxrl_post.examples.tasks import TaskSets, fitting_prompts
from jaxrl_post.examples.texts import environment_tokenizer, tokenizer_of
from jaxrl_post.records.rows.conversations import conversation
from jaxrl_post.rollout import EpisodeLimits, Group
from jaxrl_post.rollout.batch import is_trained, sequences
from jaxrl_post.sampler.requests import SamplingParams
from jaxrl_post.tokens import Tokens
from tests.rollout.scripts import ScriptedSampler
from tests.rollout.scripts import collector as make_collector

SAMPLING = SamplingParams(max_tokens=100)
LIMITS = EpisodeLimits(max_turns=4, max_prompt_tokens=400)


@pytest.fixture(scope="module")
def environment():
    return lookup()


@pytest.fixture(scope="module")
def tokenizer(environment) -> Tokenizer:
    return environment_tokenizer(environment, 512)


def called(key) -> str:
    arguments = json.dumps({"key": key})
    return f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'


class Sampler(ScriptedSampler):
    """Says what a script says, in tokens of a real tokenizer."""

    def __init__(self, tokenizer, turns) -> None:
        super().__init__(lambda request, index: "")
        self.tokenizer, self.turns = tokenizer, turns
        self.said: list[tuple[int, ...]] = []

    def _tokens(self, request, index, part):
        del part
        prompt = self.tokenizer.backend.decode(
            list(request.prompt), skip_special_tokens=False
        )
        turn = prompt.count("<|eos|>")
        ids = (*self.tokenizer.encode(self.turns[index][turn]), self.tokenizer.eos_id)
        self.said.append(ids)
        return Tokens.generated(ids, [-0.5] * len(ids), version=self.version)

    def collect(self):
        # `ScriptedSampler` looks for its own stop token.
        from jaxrl_post.sampler.requests import Completion

        waiting, self._waiting = self._waiting, []
        return [
            Completion(r.prompt_id, index, self._tokens(r, index, 1), "stop")
            for r, index, _ in waiting
        ]


@pytest.mark.processes
def test_calls_results_and_answers_are_the_tokens_of_the_template(
    environment, tokenizer
):
    task = environment.tasks("eval")[9]
    key, other, value = "5993", "4369", task.reference
    scripts = [
        # Looks twice; makes the value up; cannot write a call; asks for another tool.
        [called(key), called(other), value],
        ["99"],
        ['<tool_call>{"name": look}</tool_call>', value],
        [called(key).replace("look", "find"), value],
        ["I look." + called(key) + called(other), value],
        # Writes half of a surrogate pair, as the name and as an argument.
        [called("\ud83d") + called(key).replace("look", r"\udc00"), value],
    ]
    sampler = Sampler(tokenizer, scripts)
    codec = Codec(tokenizer)
    with WorkerPool(environment, 1, deadline_s=60.0) as judges:
        collector = make_collector(codec, judges, LIMITS, deadline_s=60.0)
        (group,) = collector.run(sampler, [(3, task)], len(scripts), SAMPLING)
    episodes = group.episodes
    assert [e.error for e in episodes] == [""] * len(scripts)
    assert [e.reward for e in episodes] == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    texts = [
        tokenizer.backend.decode(e.tokens.ids.tolist(), skip_special_tokens=False)
        for e in episodes
    ]
    begin = f"look(key)\n{key}?"
    assert texts[0] == (
        f"{begin}{called(key)}<|eos|><tool_response>{other}</tool_response>"
        f"{called(other)}<|eos|><tool_response>{value}</tool_response>{value}<|eos|>"
    )
    assert texts[1] == f"{begin}99<|eos|>"
    assert "1 of the calls could not be read" in texts[2]
    assert "error: there is no tool 'find'; there are look" in texts[3]
    results = "".join(f"<tool_response>{r}</tool_response>" for r in (other, value))
    assert results in texts[4]
    assert "error: there is no tool '\ufffd'" in texts[5]
    # Exactly the sampled tokens are trained on, each once.
    for episode, script in zip(episodes, scripts, strict=True):
        expected = [
            token
            for said in script
            for token in (*tokenizer.encode(said), tokenizer.eos_id)
        ]
        tokens = episode.tokens
        assert tokens.ids[tokens.sampled].tolist() == expected
        assert (tokens.logprobs[~tokens.sampled] == 0).all()
    check_marks(episodes)
    # transformers would render the same conversation alike.
    messages = [
        *task.messages,
        demonstration(environment, task),
        Message("tool", other),
    ]
    options = chat.with_tools(task.tools)
    assert texts[0].startswith(chat.render_text(tokenizer, messages, options))
    assert episodes[0].metrics["tools/calls"] == 2
    assert episodes[2].metrics["tools/broken"] == 1
    assert episodes[2].metrics["tools/errors/unreadable"] == 1
    assert episodes[3].metrics["tools/errors/unknown_tool"] == 1


def total(numbers: list[int]) -> int:
    """Adds numbers."""
    return sum(numbers)


# Qwen3-Coder's way to write a call, in short.
TAGS = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
    "{{ '<|eos|>' if m.role == 'assistant' }}{% endfor %}"
)


@pytest.mark.processes
def test_the_tools_give_arguments_their_types():
    environment = ToolEnvironment(make("arithmetic"), (Functions(total),))
    task = environment.tasks("eval")[0]
    tokenizer = Tokenizer.train(["1"], chat_template=TAGS)
    call = (
        "<tool_call>\n<function=total>\n<parameter=numbers>\n{}\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    scripts = [[call.format(each), task.reference] for each in ("[40, 2]", "40, 2")]
    sampler = Sampler(tokenizer, scripts)
    limits = EpisodeLimits(max_turns=2, max_prompt_tokens=1000)
    with WorkerPool(environment, 1, deadline_s=60.0) as judges:
        collector = make_collector(Codec(tokenizer), judges, limits, deadline_s=60.0)
        (group,) = collector.run(sampler, [(3, task)], len(scripts), SAMPLING)
    read, broken = group.episodes
    assert [read.error, broken.error] == ["", ""]
    assert "</tool_call><|eos|>42" in tokenizer.backend.decode(
        read.tokens.ids.tolist(), skip_special_tokens=False
    )
    # The policy is told, and answers.
    assert "1 of the calls could not be read: a call has" in tokenizer.decode(
        broken.tokens.ids.tolist()
    )
    assert [read.reward, broken.reward] == [1.0, 1.0]


def check_marks(episodes):
    """The tokens that samples.jsonl marks as trained on are the loss's."""
    rows = [conversation(each, trained=is_trained(each)) for each in episodes]
    group = Group(3, episodes)
    made = sequences([group], np.ones((1, len(episodes)), np.float32))
    # Every episode is in the batch, and none has tokens that are not.
    assert len(made) == len(episodes)
    for row, sequence in zip(rows, made, strict=True):
        marks = [
            mark
            for turn in row["turns"]
            for mark in [False] * turn["context"] + [turn["trained"]] * turn["sampled"]
        ]
        assert marks == (np.asarray(sequence.loss_mask) > 0).tolist()
    first, _, broken, unknown, both, _ = (row["turns"] for row in rows)
    assert [call["arguments"]["text"] for call in both[0]["calls"]] == [
        '{"key": "5993"}',
        '{"key": "4369"}',
    ]
    assert [each["answers"] for each in both[1]["heard"]] == [
        call["id"] for call in both[0]["calls"]
    ]
    assert both[0]["text"] == {"text": "I look."}
    assert [len(turn.get("calls", [])) for turn in first] == [1, 1, 0]
    assert broken[0]["broken"] == 1
    assert unknown[1]["heard"][0]["text"].startswith("error: there is no tool 'find'")
    # An episode that failed is not trained on, and is in no batch.
    failed = replace(episodes[0], error="boom")
    assert not is_trained(failed)
    group = Group(3, (failed,))
    assert sequences([group], np.ones((1, 1), np.float32)) == []


def demonstration(environment, task) -> Message:
    careful = replace(environment.environment, slips=0.0)
    found = careful.demonstration(task)
    assert isinstance(found, Message)
    return found


@pytest.mark.processes
def test_flights_with_calls_go_through_a_checkpoint(environment, tokenizer):
    task = environment.tasks("eval")[9]
    turns = [[called("5993"), called("4369"), task.reference]]
    sampler = Sampler(tokenizer, turns)
    with WorkerPool(environment, 1, deadline_s=60.0) as judges:
        whole = make_collector(Codec(tokenizer), judges, LIMITS, deadline_s=60.0)
        (expected,) = whole.run(sampler, [(3, task)], 1, SAMPLING)
        # Stopped while the second call is running.
        first = make_collector(Codec(tokenizer), judges, LIMITS, deadline_s=60.0)
        first.start([(3, task)], 1, SAMPLING)
        flight = first.episodes._groups[3].flights[0]
        while len(flight.episode.turns) < 2:
            first.poll(sampler, deadline=time.monotonic() + 60)
            flight = first.episodes._groups[3].flights[0]
        assert flight.conversation[1].tool_calls[0].arguments == '{"key": "5993"}'
        saved = json.loads(json.dumps(first.state()))
    # Another process: the session's turns are taken again from the conversation.
    with WorkerPool(environment, 1, deadline_s=60.0) as judges:
        second = make_collector(Codec(tokenizer), judges, LIMITS, deadline_s=60.0)
        second.restore(saved, {3: task})
        assert second.episodes._groups[3].flights[0] == flight
        found = []
        while not found:
            found = second.poll(sampler, deadline=time.monotonic() + 60)
    (episode,) = found[0].episodes
    assert episode.to_json() == expected.episodes[0].to_json()


def test_demonstrations_are_learned_as_they_would_be_sampled(environment, tokenizer):
    sets = TaskSets.of(environment)
    shown = Demonstrations(sets, max_tokens=200)
    calls = answers = 0
    for index in range(60):
        (sequence,) = shown.encode(tokenizer, "train", index)
        learned = sequence.tokens.ids[sequence.tokens.sampled].tolist()
        text = tokenizer.backend.decode(learned, skip_special_tokens=False)
        assert text.endswith("<|eos|>")
        if "<tool_call>" in text:
            calls += 1
            prompt = sequence.tokens.ids[: -len(learned)].tolist()
            (call,) = Codec(tokenizer).read(prompt, learned[:-1]).calls
            assert call.name == "look"
        else:
            answers += 1
    assert calls > 5
    assert answers > 5


def test_tasks_with_tools_need_a_template_that_writes_them(environment):
    sets = TaskSets.of(environment)
    plain = tokenizer_of(lambda: ["5993?"], 300)
    with pytest.raises(ConfigError, match=r"of lookup\(2\) have tools, and the token"):
        fitting_prompts(sets, plain, 0, "--rollout.max-prompt-tokens", context=100)


def test_held_out_keys_are_not_trained_on(environment):
    keys = {
        split: {task.data["key"] for task in environment.tasks(split)}
        for split in ("train", "eval")
    }
    assert not keys["train"] & keys["eval"]
    assert len(keys["eval"]) > 150

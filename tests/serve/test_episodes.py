"""Agents through the openai client: what is recorded is what was served."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from jaxrl_post.serve.app import make_app
from jaxrl_post.serve.episodes import Episodes
from jaxrl_post.serve.recordings import Recording
from tests.serve.conftest import listening, make_served, make_tokenizer, until

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}

ASK = {"role": "user", "content": "What is 1+2?"}
AGAIN = {"role": "user", "content": "And 2+3?"}


class Agent:
    """An episode, and a client that knows nothing but its base URL."""

    def __init__(self, url: str, **options) -> None:
        answer = httpx.post(f"{url}/episodes", json=options)
        assert answer.status_code == 201, answer.text
        self.url = f"{url}/episodes/{answer.json()['id']}"
        assert answer.json()["base_url"] == f"{self.url}/v1"
        self.client = openai.OpenAI(
            base_url=answer.json()["base_url"], api_key="none", max_retries=0
        )

    def say(self, *messages, **options):
        given = {"model": "tiny", "messages": list(messages), "max_tokens": 10}
        return self.client.chat.completions.create(
            **(given | options), extra_body={"return_token_ids": True}
        )

    def record(self):
        return httpx.get(self.url).json()

    def post(self, path: str, **body):
        return httpx.post(f"{self.url}/{path}", json=body)


@pytest.fixture
def agent(url):
    made = Agent(url, seed=3)
    yield made
    made.client.close()
    httpx.delete(made.url)


def plain(message):
    """A message as most frameworks send it back."""
    return message.model_dump(include={"role", "content", "tool_calls"})


def sampled_of(branch):
    ids = zip(branch["token_ids"], branch["sampled"], strict=True)
    return [token for token, sampled in ids if sampled]


def test_a_conversation_is_one_branch_of_the_served_tokens(agent):
    served, messages = [], [ASK]
    for number in range(3):
        answer = agent.say(*messages)
        assert answer.choices[0].turn == number
        served.append((answer.prompt_token_ids, answer.choices[0].token_ids))
        messages += [plain(answer.choices[0].message), AGAIN]
    record = agent.record()
    assert record["calls"] == {"first": 1, "bridged": 2}
    [branch] = record["branches"]
    # The prompt of each call is the beginning of the row, to the token.
    for prompt, ids in served:
        assert branch["token_ids"][: len(prompt)] == prompt
        assert branch["token_ids"][len(prompt) : len(prompt) + len(ids)] == ids
        marks = branch["sampled"][len(prompt) : len(prompt) + len(ids)]
        assert marks == [True] * len(ids)
    assert sampled_of(branch) == [token for _, ids in served for token in ids]
    assert len(branch["token_ids"]) == sum(map(len, served[-1]))
    assert set(branch["versions"]) == {-1, 7}
    # A log-prob for each sampled token, and none for the others.
    marks = zip(branch["logprobs"], branch["sampled"], strict=True)
    assert all((value < 0) == sampled for value, sampled in marks)


def test_a_stream_is_recorded_too(agent):
    ids = []
    for event in agent.say(ASK, stream=True):
        for choice in event.choices:
            ids += choice.token_ids
    assert sampled_of(agent.record()["branches"][0]) == ids


def test_an_edited_history_is_a_branch_that_trains_each_turn_once(agent):
    first = agent.say(ASK)
    said = plain(first.choices[0].message)
    one = agent.say(ASK, said, AGAIN)
    other = agent.say(ASK, said, {"role": "user", "content": "Something else."})
    record = agent.record()
    assert record["calls"] == {"first": 1, "bridged": 1, "branched": 1}
    assert [turn["parent"] for turn in record["turns"]] == [None, 0, 0]
    left, right = record["branches"]
    shared = first.prompt_token_ids + first.choices[0].token_ids
    assert left["token_ids"][: len(shared)] == shared
    assert right["token_ids"][: len(shared)] == shared
    # The first answer is trained on in the left branch, and context in the right one.
    assert sampled_of(left) == first.choices[0].token_ids + one.choices[0].token_ids
    assert sampled_of(right) == other.choices[0].token_ids
    numbers = [n for branch in record["branches"] for n in branch["turns"] if n >= 0]
    assert sorted(set(numbers)) == [0, 1, 2]
    counts = [turn["num_tokens"] for turn in record["turns"]]
    assert [numbers.count(n) for n in range(3)] == counts


def test_an_edited_answer_begins_a_segment(agent):
    agent.say(ASK)
    edited = {"role": "assistant", "content": "It is three, of course."}
    agent.say(ASK, edited, AGAIN)
    agent.say(ASK)
    record = agent.record()
    assert record["calls"] == {"first": 1, "edited": 1, "again": 1}
    assert [turn["parent"] for turn in record["turns"]] == [None] * 3
    assert len(record["branches"]) == 3


def test_a_call_that_is_repeated_gets_another_answer(agent):
    answers = [agent.say(ASK).choices[0].token_ids for _ in range(3)]
    assert len(set(map(tuple, answers))) == 3


def test_an_episode_with_a_seed_can_be_repeated(url):
    def run(seed):
        agent = Agent(url, seed=seed)
        first = agent.say(ASK)
        agent.say(ASK, plain(first.choices[0].message), AGAIN)
        record = agent.record()
        httpx.delete(agent.url)
        agent.client.close()
        return record["branches"][0]["token_ids"]

    assert run(5) == run(5) != run(6)


def test_the_seed_of_an_episode_comes_before_that_of_a_request(url):
    def said(seed):
        agent = Agent(url, seed=seed)
        answers = [agent.say(ASK, seed=42).choices[0].token_ids for _ in range(2)]
        httpx.delete(agent.url)
        agent.client.close()
        return answers

    # All samples of a group would be one, and there would be nothing to learn.
    first, again = said(5)
    assert first != again
    assert said(6)[0] != first
    # Without a seed of the episode's own a request has its way.
    free = Agent(url)
    assert len({tuple(free.say(ASK, seed=4).choices[0].token_ids) for _ in "ab"}) == 1
    free.client.close()


def test_a_call_that_gets_no_answer_gives_its_turn_back(served):
    episodes = Episodes()
    recording = Recording("one", most_turns=2)
    episodes.keep(recording, 600.0)
    with listening(served, app=make_app(served, episodes=episodes)) as url:
        agent = Agent(url, id="other")
        agent.client.base_url = f"{url}/episodes/one/v1"
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            agent.say(ASK, max_tokens=10_000)
        with pytest.raises(openai.ConflictError, match="the call asks for 3"):
            agent.say(ASK, n=3)
        # The client leaves in the middle of the answer.
        with agent.say(ASK, stream=True, max_tokens=128) as stream:
            next(iter(stream))
            assert recording.running.total() == 1
        until(lambda: not recording.running.total(), "the call is dropped")
        for _ in range(2 - len(recording.turns)):
            agent.say(ASK)
        with pytest.raises(openai.ConflictError, match="has had its 2 turns"):
            agent.say(ASK)
        agent.client.close()


def test_tool_calls_are_continued_as_they_were_sampled(agent):
    options = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 100}
    first = agent.say(ASK, **options)
    message = plain(first.choices[0].message)
    [call] = message["tool_calls"]
    result = {"role": "tool", "content": "3", "tool_call_id": call["id"]}
    # Frameworks write the arguments again.
    arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    call["function"]["arguments"] = arguments
    second = agent.say(ASK, message, result, tools=[TOOL])
    told = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(told)] == told
    assert agent.record()["calls"] == {"first": 1, "bridged": 1}


def test_an_answer_that_cannot_be_sent_is_not_recorded(tokenizer):
    # The name of the model is in every answer, and UTF-8 cannot write this one.
    model = make_served(tokenizer, name="tiny\ud83d")
    with listening(model) as url:
        agent = Agent(url)
        with pytest.raises(openai.InternalServerError):
            agent.say(ASK, model=None)
        assert agent.record()["turns"] == []
        agent.client.close()
    assert model.service.close(60)


def test_other_tools_begin_a_segment(agent):
    first = agent.say(ASK)
    agent.say(ASK, plain(first.choices[0].message), AGAIN, tools=[TOOL])
    assert agent.record()["calls"] == {"first": 1, "edited": 1}


def test_rewards_of_turns_and_of_the_episode(agent):
    agent.say(ASK)
    agent.say(ASK)
    assert agent.post("reward", reward=0.5, turn=1).status_code == 200
    assert agent.post("reward", reward=1.0).status_code == 200
    ended = agent.post("end", reward=2.0, reason="done").json()
    assert ended["reward"] == 3.5
    assert ended["turn_rewards"] == {"1": 0.5}
    assert ended["ended"] == "done"
    assert ended == agent.record()


def test_a_reward_that_is_none(agent):
    agent.say(ASK)
    body = b'{"reward": NaN}'
    assert httpx.post(f"{agent.url}/reward", content=body).status_code == 400
    assert agent.post("reward", reward="much").status_code == 400
    answer = agent.post("reward", reward=1.0, turn=1)
    assert answer.status_code == 400
    assert "1 turns, numbered from 0; got 1" in answer.text
    assert agent.record()["reward"] == 0


def test_rewards_whose_sum_overflows_are_refused(agent):
    agent.say(ASK)
    assert agent.post("reward", reward=2e38).status_code == 200
    for path, body in (
        ("reward", {"reward": 2e38}),
        ("reward", {"reward": -2e38, "turn": 0}),
        ("reward", {"reward": 1e308}),
        ("end", {"reward": 2e38}),
    ):
        answer = agent.post(path, **body)
        assert answer.status_code == 400, path
        assert "reward: must be finite in float32" in answer.json()["error"]["message"]
    # The recording is still there.
    assert agent.record()["reward"] == 2e38
    assert agent.post("end", reward=1.0).status_code == 200


def test_nothing_comes_after_the_end(agent):
    agent.post("end", reason="enough")
    with pytest.raises(openai.ConflictError, match="has ended: enough"):
        agent.say(ASK)
    assert agent.post("reward", reward=1.0).status_code == 409
    assert agent.post("end").status_code == 409


def test_an_episode_ends_at_its_deadline(url):
    agent = Agent(url, deadline_s=1e-6)
    with pytest.raises(openai.ConflictError, match="its deadline of 1e-06 s"):
        agent.say(ASK)
    assert "its deadline" in agent.record()["ended"]
    agent.client.close()


@pytest.mark.parametrize("stream", [False, True])
def test_an_episode_may_end_in_the_middle_of_a_call(url, served, stream, monkeypatch):
    sampler = served.service._sampler
    dispatch = sampler.dispatch

    def slowly():
        time.sleep(0.1)
        dispatch()

    agent = Agent(url, deadline_s=3.0)
    monkeypatch.setattr(sampler, "dispatch", slowly)
    body = {"messages": [ASK], "max_tokens": 128, "ignore_eos": True, "stream": stream}
    answer = agent.post("v1/chat/completions", **body)
    told = answer.json() if not stream else json.loads(answer.text.split("data: ")[-2])
    # No 5xx, nor what the server's own --timeout-s says: a client would try again.
    assert answer.status_code == (200 if stream else 409)
    assert told["error"]["code"] == "episode_ended"
    assert "its deadline of 3 s has passed" in told["error"]["message"]
    if not stream:
        assert answer.headers["x-should-retry"] == "false"
    assert "its deadline" in agent.record()["ended"]
    until(lambda: served.service.samples == 0, "the sample is stopped")
    agent.client.close()


def test_an_unknown_or_taken_episode(url, agent):
    assert httpx.get(f"{url}/episodes/nobody").status_code == 404
    taken = {"id": agent.url.rpartition("/")[2]}
    assert httpx.post(f"{url}/episodes", json=taken).status_code == 409
    for bad in ("a/b", "", "x" * 129, "ü"):
        answer = httpx.post(f"{url}/episodes", json={"id": bad})
        assert answer.status_code == (201 if bad == "" else 400), bad


def test_no_more_episodes_than_may_be_kept(served):
    episodes = Episodes(most=3)
    with listening(served, app=make_app(served, episodes=episodes)) as url:

        def opened(name, **options):
            body = {"id": name} | options
            return httpx.post(f"{url}/episodes", json=body).status_code

        def there(*names):
            found = [httpx.get(f"{url}/episodes/{n}").status_code for n in names]
            text = httpx.get(f"{url}/metrics").text
            kept = [line for line in text.splitlines() if "episodes_kept " in line]
            return found, float(kept[-1].split()[-1])

        assert [opened(name) for name in "abc"] == [201] * 3
        # All of them are open.
        assert opened("d") == 429
        for name in "cb":
            assert httpx.post(f"{url}/episodes/{name}/end", json={}).status_code == 200
        # The oldest of those that have ended makes room.
        assert opened("d") == 201
        assert there(*"abcd") == ([200, 404, 200, 200], 3)
        assert opened("e", deadline_s=1e-6) == 201
        assert there(*"acde") == ([200, 404, 200, 200], 3)
        # It was not ended or looked at: its agent has crashed.
        assert opened("f") == 201
        assert there(*"adef") == ([200, 200, 404, 200], 3)
        assert httpx.delete(f"{url}/episodes/a").status_code == 200
        assert there(*"adf") == ([404, 200, 200], 2)


# As Qwen 3: reasoning is left out of all turns but the last.
FORGETS = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_is_bridged(tokenizer):
    model = make_served(make_tokenizer(FORGETS))
    with listening(model) as url:
        agent = Agent(url, seed=1)
        first = agent.say(ASK)
        second = agent.say(ASK, plain(first.choices[0].message), AGAIN)
        told = first.prompt_token_ids + first.choices[0].token_ids
        assert second.prompt_token_ids[: len(told)] == told
        rest = tokenizer.backend.decode(
            second.prompt_token_ids[len(told) :], skip_special_tokens=False
        )
        end = tokenizer.backend.token_to_id("<|im_end|>")
        assert rest == ("" if told[-1] == end else "<|im_end|>") + (
            "\n<|im_start|>user\nAnd 2+3?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert agent.record()["calls"] == {"first": 1, "bridged": 1}
        agent.client.close()
    assert model.service.close(60)


def test_the_metrics_count_calls_by_kind(url, agent):
    def edited():
        text = httpx.get(f"{url}/metrics").text
        lines = [line for line in text.splitlines() if 'kind="edited"' in line]
        return sum(float(line.split()[-1]) for line in lines if "_total" in line)

    before = edited()
    agent.say(ASK)
    agent.say({"role": "user", "content": "New."})
    assert edited() == before + 1
    # Calls at the same time are counted once, too.
    before = edited()
    with ThreadPoolExecutor(8) as threads:
        asked = [{"role": "user", "content": f"New {n}."} for n in range(8)]
        list(threads.map(agent.say, asked))
    assert edited() == before + 8


def test_players_have_base_urls_and_rewards_of_their_own(agent):
    def say(name, *messages):
        answer = httpx.post(
            f"{agent.url}/players/{name}/v1/chat/completions",
            json={"model": "tiny", "messages": list(messages), "max_tokens": 5},
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    told = {name: say(name, ASK) for name in ("one", "two")}
    assert [choice["turn"] for choice in told.values()] == [0, 1]
    # The first answer of the other one, in the place of one's own.
    other = {"role": "assistant", "content": told["one"]["message"]["content"]}
    if other["content"] != told["two"]["message"]["content"]:
        assert say("two", ASK, other, AGAIN)["turn"] == 2
        assert agent.record()["calls"] == {"first": 2, "edited": 1}
    assert agent.post("players/one/reward", reward=0.5).status_code == 200
    assert agent.post("players/one/reward", reward=0.25, turn=0).status_code == 200
    record = agent.record()
    assert record["turn_rewards"] == {"0": 0.75}
    assert [turn["player"] for turn in record["turns"][:2]] == ["one", "two"]
    assert httpx.get(f"{agent.url}/players/one/v1/models").status_code == 200


def test_players_that_cannot_be_are_refused(agent):
    agent.say(ASK)
    for path, body, message in (
        ("players/a%20b/reward", {"reward": 1.0}, "a player's name must be 1 to 64"),
        ("players/a.b/v1/chat/completions", {"messages": [ASK]}, "got 'a.b'"),
        ("players/nobody/reward", {"reward": 1.0}, "nobody has no turn yet"),
    ):
        answer = agent.post(path, **body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]

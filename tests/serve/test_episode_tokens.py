"""Agents that send token ids: what is recorded is what was served."""

import json
import time

import httpx
import pytest

from jaxrl_post.serve.app import make_app
from jaxrl_post.serve.episodes import Episodes
from jaxrl_post.serve.recordings import Recording
from tests.serve.conftest import listening, make_served, until

GENERATE = "inference/v1/generate"
ASK, MORE = [5, 6, 7], [8, 9]


class Agent:
    """An episode, and an agent that knows the tokens of its conversation."""

    def __init__(self, url: str, **options) -> None:
        answer = httpx.post(f"{url}/episodes", json=options)
        assert answer.status_code == 201, answer.text
        self.server, self.id = url, answer.json()["id"]
        self.url = f"{url}/episodes/{self.id}"

    def post(self, path: str, body):
        return httpx.post(f"{self.url}/{path}", json=body, timeout=60)

    def asked(self, prompt, path: str = GENERATE, **sampling):
        given = {"max_tokens": 10, "logprobs": 1} | sampling
        return self.post(path, {"token_ids": prompt, "sampling_params": given})

    def choices(self, prompt, path: str = GENERATE, **sampling):
        answer = self.asked(prompt, path, **sampling)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    def say(self, prompt, path: str = GENERATE, **sampling):
        [choice] = self.choices(prompt, path, **sampling)
        return choice["token_ids"]

    def record(self):
        return httpx.get(self.url).json()


@pytest.fixture
def agent(url):
    made = Agent(url, seed=3)
    yield made
    httpx.delete(made.url)


def trained(branch):
    """The sampled tokens of a branch by turn."""
    found: dict[int, list[int]] = {}
    rows = zip(branch["turns"], branch["token_ids"], branch["sampled"], strict=True)
    for turn, token, sampled in rows:
        assert sampled == (turn >= 0)
        if sampled:
            found.setdefault(turn, []).append(token)
    return found


def other(token):
    return token + 1 if token < 200 else token - 1


def test_a_conversation_is_one_branch_of_the_served_tokens(agent):
    prompt, told, places = ASK, {}, {}
    for number in range(3):
        [choice] = agent.choices(prompt)
        ids = choice["token_ids"]
        assert choice["turn"] == number
        told[number] = ids
        for place, each in enumerate(choice["logprobs"]["content"], len(prompt)):
            places[place] = each["token_id"], each["logprob"]
        prompt = [*prompt, *ids, *MORE]
    record = agent.record()
    assert record["calls"] == {"first": 1, "bridged": 2}
    [branch] = record["branches"]
    assert branch["token_ids"] == prompt[: -len(MORE)]
    assert trained(branch) == told
    for place, token in enumerate(branch["token_ids"]):
        if branch["sampled"][place]:
            # The served log-prob belongs to the token there.
            assert places[place] == (token, pytest.approx(branch["logprobs"][place]))
        else:
            assert place not in places
            assert branch["logprobs"][place] == 0


def test_an_answer_that_is_continued_at_once_is_context_of_the_next(agent):
    first = agent.say(ASK, ignore_eos=True)
    second = agent.say([*ASK, *first])
    record = agent.record()
    assert record["calls"] == {"first": 1, "bridged": 1}
    [branch] = record["branches"]
    assert branch["token_ids"] == [*ASK, *first, *second]
    assert trained(branch) == {0: first, 1: second}


def test_edited_tokens_are_a_branch_that_trains_each_turn_once(agent):
    first = agent.say(ASK)
    told = [*ASK, *first]
    second = agent.say([*told, *MORE])
    # Other tokens after the first answer; then a token of the second answer is edited.
    third = agent.say([*told, 11, 12])
    edited = [*told, *MORE, *second[:2], other(second[2]), *second[3:], 11]
    fourth = agent.say(edited)
    record = agent.record()
    assert record["calls"] == {"first": 1, "bridged": 1, "branched": 2}
    assert [turn["parent"] for turn in record["turns"]] == [None, 0, 0, 0]
    rows = [branch["token_ids"] for branch in record["branches"]]
    assert rows == [
        [*told, *MORE, *second],
        [*told, 11, 12, *third],
        [*edited, *fourth],
    ]
    marks = [trained(branch) for branch in record["branches"]]
    # The first answer is context in the later ones, and so is the edited one.
    assert marks == [{0: first, 1: second}, {2: third}, {3: fourth}]


def test_an_edited_beginning_or_first_answer_begins_a_segment(agent):
    first = agent.say(ASK)
    changed = [*ASK, other(first[0]), *first[1:], *MORE]
    second = agent.say(changed)
    third = agent.say(ASK)
    fourth = agent.say([*changed, *second, 4])
    record = agent.record()
    assert record["calls"] == {"first": 1, "edited": 1, "again": 1, "bridged": 1}
    assert [turn["parent"] for turn in record["turns"]] == [None, None, None, 1]
    assert [trained(branch) for branch in record["branches"]] == [
        {0: first},
        {2: third},
        {1: second, 3: fourth},
    ]
    # A call that is repeated gets another answer.
    assert first != third


def test_each_of_several_answers_can_be_continued(agent):
    choices = agent.choices(ASK, n=2)
    assert [choice["turn"] for choice in choices] == [0, 1]
    one, two = (choice["token_ids"] for choice in choices)
    assert one != two
    third = agent.say([*ASK, *two, *MORE])
    record = agent.record()
    assert [turn["parent"] for turn in record["turns"]] == [None, None, 1]
    assert [trained(b) for b in record["branches"]] == [{0: one}, {1: two, 2: third}]


def test_chats_and_token_ids_in_one_episode(agent, tokenizer):
    messages = [{"role": "user", "content": "What is 1+2?"}]

    def chat(**options):
        body = {"messages": messages, "max_tokens": 10, "return_token_ids": True}
        answer = agent.post("v1/chat/completions", body | options)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        content = choice["message"]["content"]
        messages.append({"role": "assistant", "content": content})
        return answer.json()["prompt_token_ids"], choice

    seven = {"structured_outputs": {"choice": ["7"]}}
    prompt, choice = chat()
    first = choice["token_ids"]
    # The agent renders the next question itself, as the template does.
    text = "\n<|im_start|>user\nAnd 2+5?<|im_end|>\n<|im_start|>assistant\n"
    if first[-1] != tokenizer.stop_ids[0]:
        text = "<|im_end|>" + text
    told = [*prompt, *first, *tokenizer.encode(text)]
    second = agent.say(told, **seven)
    assert second == [*tokenizer.encode("7"), tokenizer.stop_ids[0]]
    messages += [
        {"role": "user", "content": "And 2+5?"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "Sure?"},
    ]
    # The chat continues the first answer by its messages, the second by its tokens.
    prompt, choice = chat(**seven)
    assert prompt[: len(told) + len(second)] == [*told, *second]
    third = choice["token_ids"]
    # By messages again, and by token ids again.
    messages.append({"role": "user", "content": "Why?"})
    prompt, choice = chat()
    fourth = choice["token_ids"]
    fifth = agent.say([*prompt, *fourth, 5])
    record = agent.record()
    assert record["calls"] == {"first": 1, "bridged": 4}
    [branch] = record["branches"]
    assert branch["token_ids"] == [*prompt, *fourth, 5, *fifth]
    assert trained(branch) == dict(enumerate([first, second, third, fourth, fifth]))


def test_players_and_rewards_of_turns(agent):
    paths = [f"players/{name}/{GENERATE}" for name in ("one", "two")]
    one, two = (agent.choices(ASK, path)[0] for path in paths)
    assert (one["turn"], two["turn"]) == (0, 1)
    # The answer of the other one, in the place of one's own.
    third = agent.say([*ASK, *one["token_ids"], *MORE], paths[1])
    fourth = agent.say([*ASK, *two["token_ids"], *MORE], paths[1])
    record = agent.record()
    assert record["calls"] == {"first": 2, "edited": 1, "bridged": 1}
    assert [turn["parent"] for turn in record["turns"]] == [None, None, None, 1]
    assert [turn["player"] for turn in record["turns"]] == ["one", *["two"] * 3]
    assert [trained(b) for b in record["branches"]] == [
        {0: one["token_ids"]},
        {2: third},
        {1: two["token_ids"], 3: fourth},
    ]
    assert agent.post("players/one/reward", {"reward": 0.5}).status_code == 200
    assert agent.post("reward", {"reward": 0.25, "turn": 3}).status_code == 200
    record = agent.record()
    assert record["turn_rewards"] == {"0": 0.5, "3": 0.25}
    wrong = agent.post("players/a.b/" + GENERATE, {"token_ids": ASK})
    assert wrong.status_code == 400
    assert "got 'a.b'" in wrong.text


def completed(agent, prompt, **options):
    body = {"prompt": prompt, "max_tokens": 6, "return_token_ids": True}
    return agent.post("v1/completions", body | options)


def test_completions_of_token_ids_are_recorded_too(agent):
    answer = completed(agent, ASK).json()
    first = answer["choices"][0]["token_ids"]
    assert answer["choices"][0]["turn"] == 0
    told = [*ASK, *first, *MORE]
    ids, turns = [], []
    for line in completed(agent, told, stream=True).text.splitlines():
        if line.startswith("data: {"):
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            ids += choice["token_ids"]
            turns += [choice["turn"]] if "turn" in choice else []
    assert turns == [1]
    third = agent.say([*told, *ids, 4])
    [branch] = agent.record()["branches"]
    assert branch["token_ids"] == [*told, *ids, 4, *third]
    assert trained(branch) == {0: first, 1: ids, 2: third}


@pytest.mark.parametrize("prompt", ["1+2=", [ASK], [ASK, ASK], ["1", "2"], []])
def test_a_completion_without_the_token_ids_of_one_prompt_is_refused(agent, prompt):
    answer = completed(agent, prompt)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("prompt: an episode's calls have one prompt, a list of")
    assert agent.record()["turns"] == []
    assert agent.record()["calls"] == {}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"token_ids": []}, "token_ids: List should have at least 1 item"),
        ({"token_ids": [-1]}, "token_ids.0: Input should be greater than or equal"),
        ({"token_ids": [5, 320]}, "token ids must lie in 0..319; got 320"),
        ({"token_ids": [2**70]}, "token_ids.0: Input should be less than or equal"),
        ({"token_ids": ["5"] * 2, "x": 1}, "x: there is no such field here"),
        ({"token_ids": [5] * 384}, "maximum context length is 384"),
        (
            {"token_ids": ASK, "sampling_params": {"max_tokens": 384}},
            "maximum context length is 384",
        ),
        (
            {"token_ids": ASK, "sampling_params": {"n": 129}},
            "sampling_params.n: Input should be less",
        ),
        (
            {"token_ids": ASK, "sampling_params": {"structured_outputs": {"x": 1}}},
            "structured_outputs",
        ),
        ({"token_ids": ASK, "features": {"mm_hashes": {}}}, "features: this sampler"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_and_not_counted(agent, body, told):
    answer = agent.post(GENERATE, body)
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]
    record = agent.record()
    assert record["turns"] == []
    assert record["calls"] == {}
    # The next one is the first.
    agent.say(ASK)
    assert agent.record()["calls"] == {"first": 1}


def test_an_episode_that_has_ended_or_never_was(url, agent):
    agent.post("end", {"reason": "enough"})
    for path, body in (
        (GENERATE, {"token_ids": ASK}),
        ("v1/completions", {"prompt": ASK}),
    ):
        answer = agent.post(path, body)
        assert answer.status_code == 409
        assert answer.json()["error"]["code"] == "episode_ended"
        assert "has ended: enough" in answer.text
        missing = httpx.post(f"{url}/episodes/nobody/{path}", json=body)
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "episode_not_found"
    late = Agent(url, deadline_s=1e-6)
    answer = late.asked(ASK)
    assert answer.status_code == 409
    assert "its deadline of 1e-06 s has passed" in answer.text


def test_an_answer_that_takes_longer_than_its_episode_is_stopped(tokenizer):
    model = make_served(tokenizer)
    sampler = model.service._sampler
    dispatch = sampler.dispatch

    def slowly():
        time.sleep(0.1)
        dispatch()

    sampler.dispatch = slowly
    with listening(model) as url:
        agent = Agent(url, deadline_s=0.4)
        answer = agent.asked(ASK, max_tokens=128, ignore_eos=True)
        assert answer.status_code == 409
        until(lambda: model.service.samples == 0, "the sample is stopped")
        assert agent.asked(ASK).status_code == 409
        record = agent.record()
        assert record["turns"] == []
        assert "its deadline of 0.4 s" in record["ended"]
    assert model.service.close(60)


def test_more_turns_than_an_episode_may_have_are_refused(served):
    episodes = Episodes()
    recording = Recording("one", most_turns=2)
    episodes.keep(recording, 600.0)
    with listening(served, app=make_app(served, episodes=episodes)) as url:
        agent = Agent(url)
        agent.url = f"{url}/episodes/one"
        assert agent.asked(ASK, n=3).status_code == 409
        assert agent.asked([320]).status_code == 400
        agent.choices(ASK, n=2)
        answer = agent.asked(ASK)
        assert answer.status_code == 409
        assert "has had its 2 turns" in answer.text
        assert recording.running.total() == 0


def test_an_episode_with_a_seed_can_be_repeated(url):
    def run(episode, **sampling):
        agent = Agent(url, seed=episode)
        first = agent.say(ASK, **sampling)
        second = agent.say([*ASK, *first, *MORE], **sampling)
        httpx.delete(agent.url)
        return first, second

    assert run(5) == run(5) != run(6)
    # The request's own seed would make all samples of a group one and the same.
    assert run(6, seed=4) == run(6) != run(5, seed=4)


def test_the_metrics_count_calls_by_kind(url, agent):
    def counted(kind):
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        own = [each for each in lines if f'kind="{kind}"' in each and "_total" in each]
        return sum(float(line.split()[-1]) for line in own)

    before = counted("bridged"), counted("branched")
    told = [*ASK, *agent.say(ASK)]
    for more in (MORE, [4]):
        agent.say([*told, *more])
    assert counted("bridged") == before[0] + 1
    assert counted("branched") == before[1] + 1


def in_session(url, name, token_ids=ASK, **sampling):
    """Requests of the training client of verifiers."""
    body = {
        "model": "tiny",
        "token_ids": list(token_ids),
        "sampling_params": {
            "temperature": 1.0,
            "max_tokens": 10,
            "routed_experts_prompt_start": 0,
            "stop_token_ids": [4],
            "logprobs": 1,
            "skip_special_tokens": False,
        }
        | sampling,
    }
    headers = {} if name is None else {"X-Session-ID": name}
    return httpx.post(f"{url}/{GENERATE}", json=body, headers=headers, timeout=60)


def test_the_header_of_verifiers_names_the_episode(url, agent):
    before = in_session(url, None).json()
    assert "turn" not in before["choices"][0]
    prompt, told = ASK, {}
    for number in range(3):
        answer = in_session(url, agent.id, prompt)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        assert choice["turn"] == number
        told[number] = choice["token_ids"]
        # As the client of `renderers` checks it.
        content = choice["logprobs"]["content"]
        assert [each["token"] for each in content] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        prompt = [*prompt, *choice["token_ids"], *MORE]
    [branch] = agent.record()["branches"]
    assert trained(branch) == told
    # A bare call belongs to no episode, and neither does an empty header.
    for name in (None, ""):
        assert "turn" not in in_session(url, name).json()["choices"][0]
    assert len(agent.record()["turns"]) == 3
    agent.post("end", {})
    assert in_session(url, agent.id).status_code == 409


def test_the_url_comes_before_the_header(url, agent):
    body = {"token_ids": ASK, "sampling_params": {"max_tokens": 5}}
    headers = {"X-Session-ID": "a-trace-of-the-client"}
    answer = httpx.post(f"{agent.url}/{GENERATE}", json=body, headers=headers)
    assert answer.json()["choices"][0]["turn"] == 0
    assert len(agent.record()["turns"]) == 1


def test_an_unknown_session_is_served_only_where_there_are_no_episodes(served):
    with listening(served) as url:
        # A router's id, of a client that records for itself.
        plain = in_session(url, "router-7", seed=4).json()["choices"][0]
        assert plain["token_ids"]
        assert "turn" not in plain
        agent = Agent(url)
        answer = in_session(url, "router-7")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "episode_not_found"
        assert "X-Session-ID: there is no episode 'router-7'" in error["message"]
        # Also after the last one is over: its late calls must not be lost.
        assert in_session(url, agent.id).status_code == 200
        httpx.delete(agent.url)
        assert in_session(url, agent.id).status_code == 404
        assert in_session(url, None).status_code == 200

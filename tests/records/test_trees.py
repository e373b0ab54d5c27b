"""Conversations on the page: a tree of turns, marked, folded and escaped."""

import dataclasses
import math
from html.parser import HTMLParser

import pytest

from jaxrl_post.envs.env import Answer, Message, ToolCall
from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.records.report import write_report
from jaxrl_post.records.rows.conversations import conversation
from jaxrl_post.records.sinks import MetricsLog, Sample, SampleLog
from jaxrl_post.rollout import Episode, Turn
from jaxrl_post.tokens import Tokens

VOID = {"meta", "br"}
# A closed tag for each element that text of a conversation stands in, a script, and
# marks that turn text around, hide it, or move a terminal's cursor.
HOSTILE = (
    "</pre></bdi></b></code></details></summary><script>alert(1)</script>"
    "<img src=x onerror=alert(2)>\" onmouseover='alert(3)' {{ 7 * 7 }}"
    "\u202egnp\u202c\u2066x\u2069\x1b[31m\x00\x9b"
)
SHOWN = (
    HOSTILE.replace("\u202e", "[U+202E]")
    .replace("\u202c", "[U+202C]")
    .replace("\u2066", "[U+2066]")
    .replace("\u2069", "[U+2069]")
    .replace("\x9b", "[U+009B]")
    .replace("\x1b", "\u241b")
    .replace("\x00", "\u2400")
)


@dataclasses.dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    children: list["Element | str"] = dataclasses.field(default_factory=list)

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    @property
    def inside(self) -> list["Element"]:
        """All elements within, in the order of the document."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                found += [child, *child.inside]
        return found

    def all(self, name: str) -> list["Element"]:
        """The elements within of a class."""
        return [each for each in self.inside if name in each.classes]

    def own(self, name: str) -> list["Element"]:
        """The elements directly within of a class."""
        return [
            each
            for each in self.children
            if isinstance(each, Element) and name in each.classes
        ]


class Page(HTMLParser):
    """The document as a tree; a tag that is not closed is an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]
        self.feed(html)
        self.close()
        assert self.open == [self.root]

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        self.open[-1].children.append(data)


def make_turn(text="", *heard, calls=(), size=(4, 3), **changes) -> Turn:
    context, sampled = size
    said = None
    if calls or "reasoning" in changes or "broken" in changes:
        said = Answer(
            "assistant",
            text,
            tool_calls=tuple(calls),
            reasoning=changes.pop("reasoning", None),
            broken_calls=changes.pop("broken", 0),
        )
    plain = Turn(
        Tokens.context(range(context)),
        Tokens.generated(range(sampled), [-0.5] * sampled, version=1),
        "",
        text,
        "stop",
        0.0,
        messages=heard,
        said=said,
    )
    return dataclasses.replace(plain, **changes)


def user(text) -> Message:
    return Message("user", text)


def result(text, call: ToolCall, id_=None) -> Message:
    return Message("tool", text, name=call.name, tool_call_id=id_ or call.id)


ONE, TWO, WRONG = (
    ToolCall("look", '{"key": "1"}', "a"),
    ToolCall("look", '{"key": "2"}', "b"),
    ToolCall("find", "{}", "c"),
)
HEARD = result("11", ONE), result("22", TWO), result("error: no find", WRONG)


def make_episode(*turns: Turn, **changes) -> Episode:
    return Episode(0, 0, 7, "the prompt", turns, "stop", **changes)


def sample(episode: Episode, split="train", *, trained=True) -> Sample:
    reward = episode.reward
    told = conversation(episode, trained=trained)
    return Sample(
        split,
        str(episode.task_id),
        0,
        episode.prompt_text,
        episode.transcript,
        math.nan if reward is None else reward,
        episode.finish_reason,
        told,
    )


@pytest.fixture
def show(tmp_path):
    """Writes a page of samples, and reads it."""

    def shown(*samples: Sample) -> Element:
        directory = RunDirectory(tmp_path)
        # A test may write several.
        with MetricsLog(directory, resume_step=-1) as log:
            log.write(1, {})
        with SampleLog(directory, resume_step=-1) as log:
            log.write(1, samples)
        return Page(write_report(directory).read_text(encoding="utf-8")).root

    return shown


def texts(elements) -> list[str]:
    return [element.text for element in elements]


def who(element) -> str:
    """The line above a message."""
    return " ".join(element.own("who")[0].text.split())


def test_calls_have_their_results_beneath_them(show):
    page = show(
        sample(
            make_episode(
                make_turn(
                    "I look.",
                    Message("system", "Be brief."),
                    user("1 and 2?"),
                    calls=[ONE, TWO, WRONG],
                    reasoning="hm",
                    broken=1,
                ),
                # The results are named, so their order does not matter.
                make_turn(
                    "33",
                    *HEARD[::-1],
                    user("Well?"),
                    reward=1.5,
                    rewards={"format": 0.5, "answer": 1.0},
                ),
            )
        )
    )
    [talk] = page.all("talk")
    blocks = talk.own("said")
    assert [who(block) for block in blocks] == [
        "system",
        "user",
        "policy turn 1reward 0",
        "user",
        "policy turn 2reward 1.5",
    ]
    assert ["context" in block.classes for block in blocks] == [
        *(True, True, False, True, False)
    ]
    calls = blocks[2].own("call")
    written = [
        "".join(
            c.text for c in call.children if isinstance(c, Element) and not c.classes
        )
        for call in calls
    ]
    assert written == ['look({"key": "1"})', 'look({"key": "2"})', "find({})"]
    answers = [call.own("said") for call in calls]
    assert [who(each) for [each] in answers] == [
        "tool look",
        "tool look",
        "tool find failed",
    ]
    assert [each.children[-1].text for [each] in answers] == [
        "11",
        "22",
        "error: no find",
    ]
    assert ["error" in each.classes for [each] in answers] == [False, False, True]
    assert texts(blocks[2].own("wrong")) == ["calls that could not be read: 1"]
    [thought] = blocks[2].own("thought")
    assert thought.tag == "details"
    assert "open" not in thought.attributes
    assert texts(blocks[4].own("facts-of")[0].children[::2]) == [
        "3 tokens trained on",
        "4 of context",
        "weights 1",
        "ended: stop",
        "format 0.5",
        "answer 1",
    ]


def test_results_without_a_name_answer_in_order_and_a_call_may_have_none(show):
    unnamed = [dataclasses.replace(each, tool_call_id=None) for each in HEARD[:2]]
    page = show(
        sample(
            make_episode(
                make_turn("", user("?"), calls=[ONE, TWO, WRONG]),
                make_turn("", *unnamed, result("of no call", ONE, "z")),
            )
        )
    )
    [talk] = page.all("talk")
    found = [
        [each.children[-1].text for each in call.own("said")]
        for call in talk.all("call")
    ]
    assert found == [["11"], ["22"], []]
    assert texts(talk.all("gap")) == ["not answered"]
    # A result of no call is not lost.
    assert [who(each) for each in talk.own("said")] == [
        "user",
        "policy turn 1reward 0",
        "tool look",
        "policy turn 2reward 0",
    ]


def test_branches_stand_beneath_the_turn_that_they_continue(show):
    turns = [
        make_turn("first", user("?"), calls=[ONE]),
        make_turn("again", result("11", ONE)),
        make_turn("then", user("more")),
        make_turn("other", result("11", ONE), user("be brief"), branched_from=0),
        make_turn("third", result("12", ONE), branched_from=0),
        make_turn("anew", user("edited")),
    ]
    page = show(sample(make_episode(*turns, segments=(3, 4, 5))))
    [talk] = page.all("talk")
    assert [who(each) for each in talk.own("said")][1:] == ["policy turn 1reward 0"]
    branches = talk.own("branch")
    assert [who(branch) for branch in branches] == [
        "branch 1 of 3 after turn 1",
        "branch 2 of 3 after turn 1",
        "branch 3 of 3 after turn 1",
        "begins a new chain, with its own prompt",
    ]
    # Messages that two branches share are shown once, beneath the call.
    assert [[who(e).split("reward")[0] for e in b.own("said")] for b in branches] == [
        ["policy turn 2", "user", "policy turn 3"],
        ["user", "policy turn 4"],
        ["tool look", "policy turn 5"],
        ["user", "policy turn 6"],
    ]


@pytest.mark.parametrize("trained", [True, False])
def test_the_bar_has_the_tokens_in_their_order(show, trained):
    turns = make_turn("a", size=(9, 2)), make_turn("b", size=(0, 5))
    page = show(sample(make_episode(*turns), trained=trained))
    [strip] = page.all("strip")
    sampled = "trained" if trained else "sampled"
    parts = [(i.attributes["class"], i.attributes["style"]) for i in strip.inside]
    assert parts == [
        ("context", "flex-grow: 9"),
        (sampled, "flex-grow: 2"),
        (sampled, "flex-grow: 5"),
    ]
    [talk] = page.all("talk")
    assert [each.classes[-1] for each in talk.own("said")] == [sampled] * 2
    # The legend has the three.
    [legend] = page.all("marks")
    marks = [each.attributes["class"] for each in legend.inside if each.tag == "i"]
    assert marks == ["trained", "sampled", "context"]


def test_long_conversations_are_folded_and_say_what_is_left_out(show):
    page = show(sample(make_episode(*[make_turn("a", user("b"))] * 40)))
    [talk] = page.all("talk")
    [middle] = talk.own("middle")
    assert middle.tag == "details"
    assert "open" not in middle.attributes
    outside = [who(each) for each in talk.own("said") if "trained" in each.classes]
    assert outside == [f"policy turn {n}reward 0" for n in (1, 2, 39, 40)]
    folded = [who(each) for each in middle.own("said") if "trained" in each.classes]
    numbers = [*range(3, 25), *range(33, 39)]
    assert folded == [f"policy turn {n}reward 0" for n in numbers]
    assert texts(middle.own("gap")) == ["8 turns left out"]
    assert middle.children[0].text == "28 more turns"
    # A short one is not.
    page = show(sample(make_episode(*[make_turn("a", user("b"))] * 5)))
    assert page.all("middle") == []
    assert len(page.all("talk")[0].own("said")) == 10


def test_what_was_cut_says_so(show):
    long = "x" * 10_000
    page = show(sample(make_episode(make_turn(long, user(long)), make_turn("a"))))
    found = [each.text for each in page.inside if each.tag == "pre"]
    assert found[:2] == ["x" * 4000 + "\n[6000 more characters]"] * 2


def test_hostile_text_stays_text(show):
    call = ToolCall(HOSTILE, HOSTILE, HOSTILE)
    turns = [
        make_turn(
            HOSTILE,
            Message("system", HOSTILE),
            calls=[call],
            reasoning=HOSTILE,
            rewards={HOSTILE: 1.0},
            finish_reason=HOSTILE,
        ),
        make_turn(HOSTILE, result(HOSTILE, call), result(f"error: {HOSTILE}", ONE)),
        make_turn("plain", branched_from=0),
    ]
    plain = show(sample(make_episode(make_turn("a"), make_turn("b"))))
    page = show(sample(make_episode(*turns, segments=(2,))))
    scripts = [[e.text for e in p.inside if e.tag == "script"] for p in (plain, page)]
    assert scripts[0] == scripts[1]
    assert len(scripts[1]) == 3
    tags = {element.tag for element in page.all("talk")[0].inside}
    assert tags <= {
        *("div", "p", "b", "i", "pre", "code", "bdi", "span", "details", "summary")
    }
    names = {name for element in page.inside for name in element.attributes}
    assert not {name for name in names if name.startswith("on")}
    assert not names & {"href", "src", "id"}
    # All of it can be read, in each place: names lose their end.
    [talk] = page.all("talk")
    short = SHOWN[: SHOWN.index("=x onerror")]
    assert talk.text.count(short) >= 9
    assert talk.text.count(SHOWN) >= 7
    for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x9B, 0x1B, 0):
        assert chr(code) not in page.text


def test_rows_of_one_turn_and_of_earlier_versions_are_shown_as_before(show):
    page = show(sample(make_episode(make_turn("answer", user("?")))))
    assert page.all("talk") == page.all("marks") == []
    assert texts(page.all("prompt")) == ["the prompt"]
    [pair] = page.all("pair")
    assert pair.inside[-1].text == "answer"


def test_conversations_in_training_stand_beside_held_out_ones(show):
    turns = make_turn("a"), make_turn("b")
    held_out = sample(make_episode(*turns), "eval", trained=False)
    shown = [sample(make_episode(*turns)) for _ in range(9)]
    plain = dataclasses.replace(shown[0], conversation=None)
    page = show(held_out, plain, *shown)
    headings = texts(each for each in page.inside if each.tag == "h2")
    assert headings == ["Completions", "Training at step 1"]
    titles = texts(each for each in page.inside if each.tag == "h3")
    assert titles == ["Task 7", *["Task 7, sample 1"] * 4]
    assert len(page.all("marks")) == 2
    # Without held-out tasks the training samples are shown once.
    page = show(*shown)
    headings = texts(each for each in page.inside if each.tag == "h2")
    assert headings == ["Completions"]
    assert len(page.all("talk")) == 8

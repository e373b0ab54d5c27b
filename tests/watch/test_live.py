"""The page that follows a run: its server, and the page in a browser."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("starlette")

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import LiveConfig, check_live
from jaxrl_post.programs.watching import live as module
from jaxrl_post.programs.watching.live import guards, live_routes, run_live
from jaxrl_post.records.alarms import AlarmLog
from jaxrl_post.records.directory import RunDescription, RunDirectory
from jaxrl_post.records.sinks import MetricsLog, Sample, SampleLog
from tests.browser import QUIET, eventually

# It runs where it becomes markup or code.
ATTACK = (
    "<script>fetch('/attacked')</script><img src=/attacked onerror=fetch('/attacked')>"
    "<style>@import url(/attacked);</style></pre></div><iframe src=/attacked></iframe>"
    "\x1b]8;;http://x\x07 javascript:fetch('/attacked') \u202e&lt;b&gt;"
)


def log(directory, steps, resume=None):
    with MetricsLog(directory, resume_step=resume) as metrics:
        for step in steps:
            metrics.write(
                step, {"reward/mean": step / 100, "train/loss": 1.0, "time/step": 0.5}
            )


def sample(split, task, reward, text, **changes):
    fields = {"prompt": f"prompt of {task}", "finish_reason": "stop", "tokens": 5}
    return Sample(
        split, task, 0, completion=text, reward=reward, **{**fields, **changes}
    )


def conversation(text):
    turn = {
        "reward": 1.0, "finish_reason": "stop", "sampled": 3, "context": 4,
        "trained": True, "text": {"text": text},
        "heard": [{"role": "tool", "name": text, "text": text}],
        "calls": [{"name": "look_up", "arguments": {"text": text}, "id": "1"}],
    }  # fmt: skip
    parents = [None, 0, 0]
    return {"turns": [turn | {"number": n, "parent": p} for n, p in enumerate(parents)]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = RunDirectory(tmp_path_factory.mktemp("runs") / "a-run")
    directory.describe(
        RunDescription("the command", ATTACK, 7, "dp1", {}, {"steps": 200})
    )
    log(directory, range(1, 101))
    with SampleLog(directory) as samples:
        samples.write(
            50, [sample("eval", "a", 0.0, "first"), sample("eval", "b", 1.0, "same")]
        )
        train = [sample("train", f"t{n}", n / 80, f"answer {n}") for n in range(80)]
        samples.write(99, train)
        samples.write(
            100, [sample("eval", "a", 1.0, "second"), sample("eval", "b", 1.0, "same")]
        )
        hostile = {"prompt": ATTACK, "finish_reason": ATTACK, "error": ATTACK}
        samples.write(100, [sample("train", ATTACK, 1.0, ATTACK, **hostile)])
        talk = conversation(ATTACK)
        samples.write(100, [sample("train", "talk", 1.0, "x", conversation=talk)])
    row = dict.fromkeys(
        ("rule", "action", "evidence", "means", "causes", "look"), ATTACK
    )
    with AlarmLog(directory) as alarms:
        alarms.write(7, [{**row, "first": 7}])
    return directory


@contextlib.contextmanager
def served(directory):
    from starlette.applications import Starlette

    from jaxrl_post.serve.threads import serving

    with live_routes(directory) as routes:
        app = Starlette(routes=routes, middleware=guards("127.0.0.1"))
        with serving(app, "127.0.0.1", 0, name="page") as (url, _):
            yield url


@pytest.fixture(scope="module")
def url(directory):
    with served(directory) as found:
        yield found


def get(url, **headers):
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def read_whole(url):
    """The state once all of the logs are read."""
    for _ in range(2400):
        state = json.loads(get(f"{url}/state")[2])
        if state["rows"] and state["samples"] and min(state["read"].values()) == 1:
            return state
        time.sleep(0.05)
    raise AssertionError(f"the logs are not read after two minutes: {state}")


def test_page_loads_nothing_from_elsewhere(url):
    status, headers, page = get(url)
    assert status == 200
    policy = page[
        page.index("default-src") : page.index('">', page.index("default-src"))
    ]
    assert policy.startswith(
        "default-src 'none'; style-src 'unsafe-inline'; connect-src"
    )
    assert "unsafe-eval" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


def test_state_figures_samples_and_comparison(url):
    state = read_whole(url)
    assert (state["step"], state["steps"], state["samples"]) == (100, 200, 86)
    name = state["sections"][0]["figures"][0]["id"].replace("/", "%2F")
    found = json.loads(get(f"{url}/figures?id={name}&first=10.2&last=19.7")[2])
    ((_, figure),) = found.items()
    assert figure["layout"]["xaxis"]["range"] == [9.5, 20.5]
    found = json.loads(
        get(f"{url}/samples?split=train&reward_high=0.05&text=ANSWER")[2]
    )
    assert [row["completion"] for row in found["rows"]] == [
        f"answer {n}" for n in (4, 3, 2, 1, 0)
    ]
    _, headers, html = get(f"{url}/sample?offset={found['rows'][0]['offset']}")
    assert headers["Content-Type"].startswith("text/html")
    assert "answer 4" in html
    found = json.loads(get(f"{url}/compare?before=50&after=100&changed=gained")[2])
    assert [row["after"]["completion"] for row in found["rows"]] == ["second"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/state?since=x", 400),
        ("/figures?id=a&first=5&last=2", 400),
        ("/figures?id=a&first=nan&last=2", 400),
        ("/figures?id=a&first=1&last=inf", 400),
        ("/figures?" + "&".join(f"id={n}" for n in range(25)), 400),
        ("/figures?" + "&".join(["id=a"] * 500), 200),
        ("/sample?offset=0&generation=7", 404),
        ("/samples?order=best", 400),
        ("/samples?split=test", 400),
        ("/samples?reward_low=high", 400),
        ("/samples?reward_low=nan", 200),
        ("/samples?after=999999999", 200),
        ("/samples?step_low=1e300", 200),
        ("/sample", 404),
        ("/sample?offset=1", 404),
        ("/sample?offset=-1", 404),
        ("/compare?before=1", 400),
        ("/compare?before=1&after=7", 200),
        ("/figures?id=nothing", 200),
        ("/../config.json", 404),
    ],
)
def test_odd_requests_are_answered(url, path, status):
    assert get(f"{url}{path}")[0] == status


def test_requests_under_a_foreign_name_are_refused(url):
    assert get(url, Host="localhost:1")[0] == 200
    status, _, text = get(f"{url}/samples", Host="elsewhere.example")
    assert status == 400
    assert "answer" not in text


@pytest.mark.parametrize(
    ("host", "guarded"),
    [
        ("localhost", True), ("127.0.0.1", True), ("127.0.0.2", True), ("::1", True),
        ("0.0.0.0", False), ("10.0.0.7", False), ("a-machine", False),
    ],
)  # fmt: skip
def test_names_are_checked_on_every_loopback_address(host, guarded):
    found = guards(host)
    assert bool(found) == guarded
    assert not found or host in found[0].kwargs["allowed_hosts"]


def test_an_error_while_reading_is_told_and_reading_continues(directory, monkeypatch):
    errors = iter([RuntimeError("odd")])

    def advance(run, then=module.LiveRun.advance):
        for error in errors:
            raise error
        return then(run)

    monkeypatch.setattr(module.LiveRun, "advance", advance)
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    with served(directory) as url:
        state = read_whole(url)
    assert state["faults"] == [
        "a piece of the logs could not be read: RuntimeError('odd')"
    ]


def test_options_that_make_no_sense_are_refused(tmp_path, url):
    with pytest.raises(ConfigError, match="--listen: must be HOST:PORT"):
        check_live(LiveConfig("x", listen="8070"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is no directory"):
        run_live(LiveConfig(str(tmp_path / "file")), console=None)
    taken = url.removeprefix("http://")
    with pytest.raises(ConfigError, match=f"--listen: cannot listen on {taken}"):
        run_live(LiveConfig(str(tmp_path), listen=taken), console=None)


@pytest.mark.processes
def test_program_serves_until_ctrl_c(directory):
    command = [sys.executable, "-m", "launch.watch", str(directory.path)]
    program = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        told = program.stdout.readline()
        assert told.startswith("page: http://127.0.0.1:")
        assert read_whole(told.removeprefix("page: ").strip())["step"] == 100
        program.send_signal(signal.SIGINT)
        rest, _ = program.communicate(timeout=120)
    finally:
        program.kill()
    assert program.returncode == 0
    assert "Traceback" not in rest


@pytest.fixture(scope="module")
def browser():
    if shutil.which("chromium") is None:
        pytest.skip("needs chromium; tools/browser.sh installs it")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=QUIET
        )
        yield found
        found.close()


@pytest.fixture
def page(browser, url):
    """A page of the run; at the end nothing but it may have been asked for."""
    read_whole(url)
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(60_000)
    asked, faults = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.goto(url)
    eventually(page.locator(".pill.ended")).to_be_visible()
    yield page
    page.close()
    assert faults == []
    assert [each for each in asked if not each.startswith(url)] == []
    assert [each for each in asked if "attacked" in each] == []


def test_browser_draws_charts_and_looks_closer(page, url):
    eventually(page.locator("#sections .js-plotly-plot .trace").first).to_be_visible()
    begin = re.compile("^step 100 of 200")
    eventually(page.locator("#progress")).to_have_text(begin)
    eventually(page.locator("h3", has_text="Reward").first).to_be_visible()
    # Charts that are not on the screen are drawn when they are.
    page.locator("#named").fill("loss")
    # A flat line has no height, which counts as hidden.
    loss = page.locator("figure", has_text="train/loss").locator(".trace").first
    eventually(loss).to_be_attached()
    eventually(page.locator("figure:visible")).to_have_count(1)
    page.locator("#named").fill("")
    eventually(page.locator("h3", has_text="Reward").first).to_be_visible()
    chart = page.locator(".js-plotly-plot").first
    chart.scroll_into_view_if_needed()
    box = chart.locator(".nsewdrag").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.5 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], middle, steps=5)
    page.mouse.up()
    whole = page.locator("#whole")
    eventually(whole).to_be_visible()
    first, last = whole.inner_text().removeprefix("Steps ").split(":")[0].split(" to ")
    assert 45 <= int(first) < int(last) <= 75
    whole.click()
    eventually(whole).to_be_hidden()


def test_browser_asks_again_for_charts_that_it_did_not_get(browser, url):
    read_whole(url)
    page = browser.new_page()
    page.route("**/figures?*", lambda route: route.abort())
    with page.expect_event("requestfailed", timeout=60_000):
        page.goto(url)
    page.unroute("**/figures?*")
    eventually(page.locator("#sections .js-plotly-plot .trace").first).to_be_visible()
    page.close()


def test_browser_searches_samples_and_opens_a_conversation(page):
    rows, found = page.locator("#rows tr"), eventually(page.locator("#found"))
    opened = page.locator("#opened")
    page.click("nav a[href='#samples']")
    eventually(rows).to_have_count(50)
    page.click("#more")
    found.to_have_text("86 shown of 86")
    page.fill("input[name=text]", "answer 7")
    found.to_have_text("11 shown of 86 searched")
    page.fill("input[name=reward_low]", "0.9")
    found.to_have_text("8 shown of 13 searched")
    page.select_option("select[name=order]", "lowest")
    eventually(rows.first).to_contain_text("answer 72")
    rows.first.click()
    eventually(opened.locator("pre").last).to_have_text("answer 72")
    page.keyboard.press("ArrowDown")
    eventually(opened.locator("pre").last).to_have_text("answer 73")
    for name in ("text", "reward_low"):
        page.fill(f"input[name={name}]", "")
    page.fill("input[name=task]", "talk")
    eventually(rows).to_have_count(1)
    rows.filter(has_text="3 turns").click()
    eventually(opened.locator(".branch")).to_have_count(2)


def test_browser_compares_two_evaluations(page):
    pairs, told = page.locator("#pairs article"), eventually(page.locator("#paired"))
    page.click("nav a[href='#compare']")
    told.to_have_text("2 tasks: the reward rose in 1 and fell in 0.")
    eventually(pairs).to_have_count(2)
    page.select_option("select[name=changed]", "gained")
    eventually(pairs).to_have_count(1)
    eventually(pairs.locator(".pair pre")).to_have_text(["first", "second"])
    page.select_option("select[name=changed]", "lost")
    eventually(pairs).to_have_count(0)


def test_browser_shows_hostile_texts_as_they_are(page):
    rows, opened = page.locator("#rows tr"), page.locator("#opened")
    page.click("nav a[href='#samples']")
    page.fill("input[name=text]", "onerror=fetch")
    eventually(rows).to_have_count(2)
    # A conversation whose first turn has two answers, and a sample without turns.
    for row, branches in ((rows.nth(0), 2), (rows.nth(1), 0)):
        row.click()
        hostile = opened.locator("pre", has_text="<script>fetch").first
        eventually(opened.locator(".branch")).to_have_count(branches)
        eventually(hostile).to_be_visible()
        # By now it would have run.
        page.wait_for_timeout(200)
        assert opened.locator(":is(script, img, iframe, style)").count() == 0
    page.click("nav a[href='#alarms']")
    eventually(page.locator("#rules h3")).to_contain_text("onerror=fetch")
    page.click("nav a[href='#configuration']")
    task = page.locator("#facts dd", has_text="onerror=fetch")
    eventually(task).to_be_visible()
    assert page.locator("main :is(script, img, iframe)").count() == 0


class Held:
    """Keeps the page's first request for a path until it is let go."""

    def __init__(self, page, path):
        self.page, self.kept = page, []
        page.route(f"**/{path}?*", self._keep)

    def _keep(self, route):
        if self.kept:
            route.continue_()
        else:
            self.kept.append(route)

    def answer(self, **answer):
        """Answers now, and gives the page the time to show it."""
        if answer:
            self.kept[0].fulfill(**answer)
        else:
            self.kept[0].continue_()
        self.page.wait_for_timeout(500)


def test_browser_shows_what_was_asked_last_though_it_came_first(page):
    page.click("nav a[href='#samples']")
    page.fill("input[name=text]", "answer 7")
    rows, opened = page.locator("#rows tr"), page.locator("#opened pre").last
    eventually(rows).to_have_count(11)
    held = Held(page, "sample")
    with page.expect_request("**/sample?*"):
        rows.nth(0).click()
    rows.nth(1).click()
    eventually(opened).to_have_text("answer 78")
    held.answer()
    eventually(opened).to_have_text("answer 78")
    # A search that fails, too, tells nothing once another one is asked for.
    held = Held(page, "samples")
    with page.expect_request("**/samples?*"):
        page.fill("input[name=text]", "answer 6")
    page.fill("input[name=text]", "answer 79")
    eventually(rows).to_have_count(1)
    held.answer(status=400, body="too late")
    eventually(page.locator("#found")).to_contain_text("1 shown of")
    eventually(rows).to_contain_text("answer 79")


def test_browser_tells_why_two_evaluations_are_not_compared(page):
    page.route("**/compare?*", lambda route: route.fulfill(status=400, body="odd"))
    page.click("nav a[href='#compare']")
    eventually(page.locator("#paired")).to_have_text("odd")
    eventually(page.locator("#pairs article")).to_have_count(0)


def test_browser_follows_a_run_and_tells_if_the_server_is_gone(browser, tmp_path):
    directory = RunDirectory(tmp_path / "growing")
    directory.path.mkdir()
    page = browser.new_page()
    page.set_default_timeout(60_000)
    progress, now = eventually(page.locator("#progress")), page.locator("figure b")
    with served(directory) as url:
        page.goto(url)
        progress.to_contain_text("step 0")
        log(directory, [1, 2])
        progress.to_contain_text("step 2")
        eventually(page.locator(".js-plotly-plot .trace").first).to_be_visible()
        log(directory, [3], resume=2)
        progress.to_contain_text("step 3")
        eventually(now.filter(has_text="0.03")).to_be_visible()
    eventually(page.locator(".pill.gone")).to_have_text("no answer")
    assert now.filter(has_text="0.03").is_visible()
    page.close()

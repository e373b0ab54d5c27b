// Follows a run: asks for what has changed, and draws the charts that can be seen.
// Texts of the run are set as text, or come escaped from the server (/sample).
const byId = (name) => document.getElementById(name);
const POLL_MS = 2000, READING_MS = 100, TYPING_MS = 250;

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

async function ask(path, values = []) {
  const given = new URLSearchParams(values);
  const answer = await fetch(`${path}?${given}`);
  if (!answer.ok) throw new Error(await answer.text());
  return path === "/sample" ? answer.text() : answer.json();
}

// State.
let version = null, state = {}, span = null;

async function follow() {
  let wait = POLL_MS;
  try {
    if (!document.hidden || version === null) {
      const found = await ask("/state", version === null ? [] : [["since", version]]);
      state = { ...state, ...found };
      showStatus();
      if (found.sections) showContents();
      else drawSeen();
      version = found.version;
      if (state.read.metrics < 1 || state.read.samples < 1) wait = READING_MS;
    }
  } catch (error) {
    byId("status").className = "pill gone";
    byId("status").textContent = "no answer";
    byId("progress").textContent = "The server of this page does not answer; "
      + "this is what it told last.";
  }
  setTimeout(follow, wait);
}

function showStatus() {
  document.title = `${state.title} · step ${state.step}`;
  byId("title").textContent = state.title;
  byId("status").textContent = state.status;
  byId("status").className = `pill ${state.status}`;
  const parts = [`step ${state.step}${state.steps ? ` of ${state.steps}` : ""}`];
  if (state.left) parts.push(`about ${state.left} left`);
  if (state.since) parts.push(`last step ${state.since} ago`);
  const read = Math.min(state.read.metrics, state.read.samples);
  if (read < 1) parts.push(`${Math.floor(100 * read)} % of the logs read`);
  byId("progress").textContent = parts.join(" · ");
  byId("told").textContent = state.told;
  byId("told").hidden = !state.told;
  byId("faults").hidden = !state.faults.length;
  byId("faults").replaceChildren(...state.faults.map((each) =>
    make("li", { textContent: each })));
  showCount();
}

function showContents() {
  byId("tiles").replaceChildren(...state.tiles.map((tile) => make("div",
    { className: "tile" }, make("dt", { textContent: tile.title }),
    make("dd", { className: "value" },
      ...(tile.before ? [make("i", { textContent: `${tile.before} → ` })] : []),
      tile.after),
    make("dd", { className: "sub", textContent: tile.note }))));
  showSections();
  showAlarms();
  byId("command").textContent = state.command;
  byId("facts").replaceChildren(...Object.entries(state.facts ?? {}).map(
    ([name, value]) => make("div", {}, make("dt", { textContent: name }),
      make("dd", { textContent: value }))));
  byId("options").replaceChildren(...state.configuration.map(([name, value]) =>
    make("tr", {}, make("th", { textContent: name }),
      make("td", { textContent: value }))));
  choices(byId("reasons"), ["", ...state.reasons], (each) => each || "any");
  const [before, after] = ["before", "after"].map((name) => byId("steps")[name]);
  const first = !before.options.length;
  for (const list of [before, after]) choices(list, state.evaluations, String);
  if (first && state.evaluations.length) after.selectedIndex = after.length - 1;
  if (tab() === "compare") compare();
}

function choices(list, values, told) {
  if ([...list.options].map((each) => each.value).join("\n") === values.join("\n"))
    return;
  const chosen = list.value;
  list.replaceChildren(...values.map((each) =>
    make("option", { value: each, textContent: told(each) })));
  if (values.map(String).includes(chosen)) list.value = chosen;
}

// Curves.
const charts = new Map(); // By id: the figure's elements, and whether it is to be drawn.
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries)
    charts.get(entry.target.dataset.id).seen = entry.isIntersecting;
  drawSeen();
}, { rootMargin: "200px" });

function showSections() {
  const place = byId("sections"), found = new Set();
  for (const { name, figures } of state.sections) {
    let grid = place.querySelector(`[data-name="${CSS.escape(name)}"]`);
    if (!grid) {
      grid = make("div", { className: "grid" });
      grid.dataset.name = name;
      place.append(make("h2", { textContent: name }), grid);
    }
    for (const figure of figures) {
      found.add(figure.id);
      if (!charts.has(figure.id)) addChart(grid, figure);
      showFigure(charts.get(figure.id), figure);
    }
  }
  for (const [id, chart] of charts) {
    if (found.has(id)) continue; // Its step was another one.
    seen.unobserve(chart.root);
    chart.root.remove();
    charts.delete(id);
  }
  byId("others").hidden = !state.others;
  byId("others").textContent = `${state.others} more metrics are in metrics.jsonl.`;
  filterCharts();
  drawSeen();
}

function addChart(grid, figure) {
  const chart = {
    root: make("figure", { className: figure.width }),
    now: make("b"), below: make("p", { className: "sub" }),
    plot: make("div", { className: "plot" }),
    legend: make("ul", { className: "legend" }),
    zooms: figure.zooms, stale: true, seen: false, words: "",
  };
  chart.root.dataset.id = figure.id;
  chart.root.append(make("figcaption", {}, make("div", { className: "head" },
    make("h3", { textContent: figure.title }), chart.now), chart.below),
  chart.plot, chart.legend);
  chart.words = `${figure.title} ${figure.below}`.toLowerCase();
  grid.append(chart.root);
  charts.set(figure.id, chart);
  seen.observe(chart.root);
}

function showFigure(chart, figure) {
  chart.now.textContent = figure.now;
  chart.below.textContent = figure.drawn ? figure.below
    : `${figure.below} · no finite value`;
  chart.plot.hidden = !figure.drawn;
  chart.drawn = figure.drawn;
  chart.stale = true;
  chart.legend.replaceChildren(...figure.legend.map(([name, share], index) => {
    const mark = make("i");
    mark.style.background = `var(--l${index})`;
    return make("li", {}, mark, `${name} `, make("span", { textContent: share }));
  }));
}

let drawing = false;
async function drawSeen() {
  if (drawing) return;
  drawing = true;
  try {
    for (;;) {
      const wanted = [...charts].filter(([, chart]) =>
        chart.stale && chart.seen && chart.drawn && !chart.root.hidden).slice(0, 6);
      if (!wanted.length) break;
      const ids = wanted.map(([id]) => ["id", id]);
      for (const [, chart] of wanted) chart.stale = false;
      const bounds = span ? [["first", span[0]], ["last", span[1]]] : [];
      const figures = await ask("/figures", [...ids, ...bounds]).catch(() => null);
      if (!figures) { // The next state tells whether the server is there, and asks again.
        for (const [, chart] of wanted) chart.stale = true;
        break;
      }
      for (const [id, chart] of wanted)
        if (figures[id] && charts.get(id) === chart) await drawOne(chart, figures[id]);
    }
  } finally {
    drawing = false;
  }
}

async function drawOne(chart, figure) {
  await paint(chart.plot, JSON.stringify(figure));
  if (!chart.zooms || chart.listens) return;
  chart.listens = true;
  chart.plot.on("plotly_relayout", (change) => {
    const low = change["xaxis.range[0]"], high = change["xaxis.range[1]"];
    if (low !== undefined && high !== undefined) look([low, high]);
  });
  chart.plot.on("plotly_doubleclick", () => look(null));
}

function look(range) {
  span = range && [Math.floor(range[0]), Math.ceil(range[1])];
  byId("whole").hidden = !span;
  if (span) byId("whole").textContent = `Steps ${span[0]} to ${span[1]}: show all`;
  for (const chart of charts.values()) chart.stale = chart.stale || chart.zooms;
  drawSeen();
}

function filterCharts() {
  const wanted = byId("named").value.trim().toLowerCase();
  for (const chart of charts.values())
    chart.root.hidden = !chart.words.includes(wanted);
  for (const grid of byId("sections").querySelectorAll(".grid")) {
    const none = ![...grid.children].some((each) => !each.hidden);
    grid.hidden = grid.previousElementSibling.hidden = none;
  }
}

byId("named").addEventListener("input", () => { filterCharts(); drawSeen(); });
byId("whole").addEventListener("click", () => look(null));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts.values()) chart.stale = true;
  drawSeen();
});

// Samples.
let search = 0, listed = 0, shownOf = 0, continues = null, generation = 0;

async function find(more = false) {
  const turn = ++search, body = byId("rows");
  let after = more ? continues : null;
  if (!more) { listed = 0; continues = null; }
  const wanted = listed + 50;
  for (;;) {
    const values = [...new FormData(byId("query"))].filter(([, value]) => value);
    if (after !== null) values.push(["after", after]);
    const found = await ask("/samples", values).catch((error) => error);
    if (turn !== search) return; // The form asks for something else by now.
    if (found instanceof Error) {
      byId("found").textContent = found.message;
      return;
    }
    if (!listed) body.replaceChildren();
    body.append(...found.rows.map(line));
    listed += found.rows.length;
    shownOf = found.indexed;
    generation = found.generation;
    continues = after = found.after;
    byId("more").hidden = after === null;
    const looked = byId("query").text.value || byId("query").task.value;
    byId("found").textContent = `${listed.toLocaleString()} shown`
      + (looked ? ` of ${found.candidates.toLocaleString()} searched`
        : ` of ${found.candidates.toLocaleString()}`)
      + (after !== null && looked && listed < wanted ? ", searching …" : "");
    if (after === null || listed >= wanted) break;
  }
  showCount();
}

function showCount() {
  if (tab() !== "samples") return;
  // The log was cut and written again, as by a run that was resumed.
  if (listed && state.generation !== generation) return void find();
  if (!(state.samples > shownOf)) return;
  if (!listed || (byId("query").order.value === "newest" && !byId("rows").matches(":hover")
      && listed <= 50 && !byId("query").text.value)) find();
}

function line(row) {
  const reward = make("td", { className: "reward", textContent: row.reward ?? "none" });
  reward.style.setProperty("--share", row.share);
  const text = make("td", { textContent: row.found || row.completion || " " });
  text.title = row.prompt;
  if (row.failed)
    text.prepend(make("span", { className: "wrong", textContent: "failed" }));
  if (row.turns) text.prepend(make("span",
    { className: "muted", textContent: `${row.turns} turns ` }));
  const entry = make("tr", { tabIndex: 0 },
    make("td", { textContent: row.split === "eval" ? `${row.step} held out` : row.step }),
    make("td", { textContent: row.task }), reward,
    make("td", { textContent: row.tokens ?? "" }),
    make("td", { textContent: row.ended }), text);
  const open = async () => {
    for (const each of byId("rows").querySelectorAll(".on")) each.classList.remove("on");
    entry.classList.add("on");
    await openSample(byId("opened"), row.offset);
  };
  entry.addEventListener("click", open);
  entry.addEventListener("keydown", (event) => {
    if (event.key === "Enter") open();
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" };
    const to = next[event.key] && entry[next[event.key]];
    if (to) { event.preventDefault(); to.focus(); to.click(); }
  });
  return entry;
}

async function openSample(place, offset) {
  const named = [["offset", offset], ["generation", generation]];
  const asked = place.asked = ask("/sample", named).catch((error) => error);
  const found = await asked;
  if (place.asked !== asked) return; // Another sample is to be shown there by now.
  if (found instanceof Error)
    place.replaceChildren(make("p", { className: "sub", textContent: found.message }));
  else place.innerHTML = found; // Escaped there.
}

let typing = 0;
byId("query").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(find, TYPING_MS);
});
byId("query").addEventListener("submit", (event) => { event.preventDefault(); find(); });
byId("more").addEventListener("click", () => find(true));

// Comparison of two evaluations.
let comparison = 0;
async function compare() {
  const form = byId("steps"), turn = ++comparison;
  if (!form.before.value) {
    byId("paired").textContent = "There are no samples of evaluations yet.";
    return;
  }
  const found = await ask("/compare", [...new FormData(form)]).catch((error) => error);
  if (turn !== comparison) return; // The form asks for something else by now.
  if (found instanceof Error) {
    byId("paired").textContent = found.message;
    byId("pairs").replaceChildren();
    return;
  }
  byId("paired").textContent = `${found.tasks} tasks: the reward rose in `
    + `${found.gained} and fell in ${found.lost}.`
    + (found.logged < found.tasks ? ` The answers of ${found.logged} are logged.` : "");
  byId("pairs").replaceChildren(...found.rows.slice(0, 200).map(pair));
}

function pair({ before, after }) {
  const sides = [before, after].map((side) => {
    const reward = make("b",
      { className: "reward", textContent: `reward ${side.reward ?? "none"}` });
    const place = make("div", {}, make("p", { className: "sub" },
      `step ${side.step}`, reward),
    make("pre", { textContent: side.completion }));
    for (const each of [place, reward]) each.style.setProperty("--share", side.share);
    return place;
  });
  const root = make("article", { className: "example" },
    make("div", { className: "head" }, make("h3", { textContent: `Task ${before.task}` })),
    make("pre", { className: "prompt", textContent: before.prompt }),
    make("div", { className: "pair" }, ...sides));
  root.addEventListener("click", () => {
    openSample(sides[0], before.offset);
    openSample(sides[1], after.offset);
  }, { once: true });
  return root;
}

byId("steps").addEventListener("input", compare);

// Alarms.
function showAlarms() {
  const rules = state.alarms?.rules ?? [];
  byId("raised").textContent = rules.length || "";
  if (!rules.length) {
    byId("rules").replaceChildren(make("p", { className: "sub",
      textContent: state.alarms ? "No alarms." : "The run has no watch rules." }));
    return;
  }
  const row = (name, text) => make("tr", {}, make("th", { textContent: name }),
    make("td", { textContent: text }));
  byId("rules").replaceChildren(...rules.map((rule) => make("article",
    { className: "example alarm" },
    make("div", { className: "head" }, make("h3", { textContent: rule.rule }),
      make("span", { className: "sub",
        textContent: (rule.count > 1 ? `${rule.count} alarms · ` : "")
          + `action: ${rule.action}` })),
    make("table", {}, ...Object.entries(rule.runbook).map(([k, v]) => row(k, v)),
      ...rule.shown.map(([steps, evidence]) => row(`Step ${steps}`, evidence))))));
}

// Tabs.
const tab = () => byId(location.hash.slice(1))?.classList.contains("tab")
  ? location.hash.slice(1) : "curves";

function turn() {
  const name = tab();
  for (const each of document.querySelectorAll(".tab"))
    each.classList.toggle("on", each.id === name);
  for (const each of document.querySelectorAll("nav a"))
    each.classList.toggle("on", each.hash === `#${name}`);
  if (name === "samples" && !listed) find();
  if (name === "compare") compare();
  window.scrollTo(0, 0);
}
addEventListener("hashchange", turn);
turn();
follow();

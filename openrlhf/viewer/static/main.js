// The page: runs at the side, one view in the middle, keys, and the polling that keeps all of it live.

import { ask, el, short } from "./dom.js";
import { go, onMove, place } from "./place.js";
import { CurvesView } from "./curves.js";
import { EventsView, SettingsView } from "./record.js";
import { RolloutsView } from "./rollouts.js";

const COLOURS = 8;
const MOST_AT_FIRST = 4;
const POLL = 2000; // milliseconds between two looks at a run that trains
const IDLE = 10000; // … at one that has ended

const page = {
  runs: [],
  colours: new Map(), // run → number of its colour
  data: new Map(), // run → what was read of it
  catalog: null,
  view: null,

  get selected() {
    const names = new Set(this.runs.map((run) => run.name));
    if (place().runs !== undefined) {
      const wanted = place().runs.split("|").filter((name) => names.has(name));
      if (wanted.length || place().runs === "-") return wanted;
    }
    const recent = [...this.runs].sort((a, b) => b.written - a.written).slice(0, MOST_AT_FIRST);
    return this.runs.filter((run) => recent.includes(run)).map((run) => run.name);
  },

  /** The run whose rollouts are read. */
  get run() {
    const names = this.runs.map((run) => run.name);
    if (names.includes(place().run)) return place().run;
    return this.selected.find((name) => this.summary(name)?.has_rollouts) ?? this.selected[0] ?? names[0];
  },

  summary(name) {
    return this.runs.find((run) => run.name === name);
  },

  colour(name) {
    if (!this.colours.has(name)) {
      const taken = new Set(this.selected.map((run) => this.colours.get(run)));
      const free = [...Array(COLOURS).keys()].find((number) => !taken.has(number + 1));
      this.colours.set(name, free === undefined ? (this.colours.size % COLOURS) + 1 : free + 1);
    }
    return this.colours.get(name);
  },
};

const VIEWS = { curves: CurvesView, rollouts: RolloutsView, events: EventsView, settings: SettingsView };
const TITLES = { curves: "Curves", rollouts: "Rollouts", events: "Events", settings: "Settings" };

const KEYS = [
  ["Everywhere", [["m", "curves"], ["r", "rollouts"], ["e", "events"], ["s", "settings"], ["d", "light or dark"], ["/", "search"], ["?", "these keys"]]],
  ["Rollouts", [
    ["j  k", "next, previous group"], ["J  K", "next, previous step"], ["1 … 9", "a sample"], ["[  ]", "previous, next sample"],
    ["0", "all samples side by side"], ["t", "tokens or chat"], ["c  C", "next, previous column"], ["←  →", "previous, next token"],
    ["Esc", "close, go back"],
  ]],
  ["Curves", [["drag", "zoom"], ["double click", "whole axis"], ["l", "logarithmic axis"], ["x", "steps or time"]]],
];

function viewName() {
  return place().view in VIEWS ? place().view : "curves";
}

function show() {
  const name = viewName();
  if (page.view?.name !== name) {
    page.view?.close?.();
    const main = document.getElementById("main");
    main.replaceChildren();
    main.className = name;
    page.view = new VIEWS[name](main, page);
    page.view.name = name;
  }
  page.view.update();
  drawViews();
  drawRuns();
}

function drawViews() {
  const links = Object.entries(TITLES).map(([name, title]) =>
    el("a", { href: `#view=${name}`, aria: viewName() === name ? { current: "page" } : {}, on: { click: (event) => {
      event.preventDefault();
      go({ view: name }, { push: true });
    } } }, title));
  document.getElementById("views").replaceChildren(...links);
}

function statusChip(status) {
  const word = status.split(":")[0];
  return el("span", { class: `status ${word.replace(/\W/g, "")}`, title: status }, word);
}

let drawn = "";
function drawRuns() {
  const filter = document.getElementById("run-filter");
  filter.hidden = page.runs.length < 8;
  const words = filter.value.toLowerCase();
  const selected = page.selected;
  const state = JSON.stringify([page.runs, selected, words, page.run, viewName()]);
  if (state === drawn) return;
  drawn = state;
  document.body.classList.toggle("one-run", page.runs.length === 1);
  const single = viewName() === "rollouts";
  const items = page.runs.filter((run) => run.name.toLowerCase().includes(words)).map((run) => {
    const chosen = single ? run.name === page.run : selected.includes(run.name);
    const box = el("input", { type: single ? "radio" : "checkbox", name: "run", checked: chosen, aria: { label: run.name }, on: { change: () => choose(run.name, box.checked) } });
    const facts = [run.step ? `step ${run.step.toLocaleString("en")}` : "no step yet"];
    if (run.headline) facts.push(`${run.headline[0].split("/").pop()} ${short(run.headline[1])}`);
    if (run.score) facts.push(`pass@1 ${short(run.score[1])}`);
    return el("li", { class: chosen ? "chosen" : "" },
      el("label", { title: run.path },
        box,
        el("span", { class: "run-name" }, single ? null : el("i", { class: `swatch ${chosen ? `c${page.colour(run.name)}` : ""}` }), run.name),
        statusChip(run.status),
        el("small", {}, facts.join(" · ")),
        el("small", { class: "faint" }, [run.model, run.estimator].filter(Boolean).join(" · "))));
  });
  const list = document.getElementById("runs");
  const focused = list.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  list.replaceChildren(...items);
  if (focused) list.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  if (!page.runs.length) list.append(el("li", { class: "empty" }, "No run is there yet. Runs are shown as they appear."));
  const live = page.runs.filter((run) => run.status === "running").length;
  document.getElementById("live").textContent = live ? `${live} running` : "";
  document.title = page.runs.length === 1 ? `${page.runs[0].name} · OpenRLHF` : "OpenRLHF runs";
}

function choose(name, checked) {
  if (viewName() === "rollouts") {
    go({ run: name, step: null, prompt: null, sample: null, token: null });
    return;
  }
  const selected = page.selected.filter((run) => run !== name);
  if (checked) selected.push(name);
  const ordered = page.runs.map((run) => run.name).filter((run) => selected.includes(run));
  go({ runs: ordered.join("|") || "-" });
  poll();
}

/** Adds new records behind those that are there; a name that is new has had no value before. */
function append(table, added) {
  const before = table.step.length;
  for (const key of ["step", "time"]) for (const value of added[key]) table[key].push(value);
  for (const name of Object.keys(added.values)) table.values[name] ??= Array(before).fill(null);
  for (const [name, values] of Object.entries(table.values)) {
    const fresh = added.values[name] ?? Array(added.step.length).fill(null);
    for (const value of fresh) values.push(value);
  }
}

const empty = () => ({ step: [], time: [], values: {} });

/** Reads what is new of one run; whether anything is. */
async function pollRun(name) {
  const known = page.data.get(name) ?? { cursor: "", version: "", train: empty(), eval: empty(), events: [] };
  const found = await ask("new", { run: name, since: known.cursor, events: known.version });
  if (found.whole) {
    known.train = empty();
    known.eval = empty();
  }
  append(known.train, found.train);
  append(known.eval, found.eval);
  if (found.events) {
    known.events = found.events.events;
    known.version = found.events.version;
  }
  const changed = found.whole || found.train.step.length + found.eval.step.length > 0 || Boolean(found.events);
  known.cursor = found.cursor;
  page.data.set(name, known);
  const at = page.runs.findIndex((run) => run.name === name);
  if (at >= 0) page.runs[at] = found.summary;
  return changed;
}

let polling = null;
let timer = null;
async function poll() {
  clearTimeout(timer);
  if (polling) return polling;
  polling = (async () => {
    try {
      page.runs = await ask("runs");
      const results = await Promise.all(page.selected.map((name) => pollRun(name)));
      document.body.classList.remove("lost");
      if (results.some(Boolean)) page.view?.update({ fresh: true });
      await page.view?.tick?.();
      drawRuns();
    } catch (error) {
      document.body.classList.add("lost");
      document.getElementById("live").textContent = "no answer from openrlhf view";
      drawn = "";
    }
  })();
  await polling;
  polling = null;
  const running = page.runs.some((run) => run.status === "running");
  timer = setTimeout(() => (document.hidden ? later() : poll()), running ? POLL : IDLE);
  return undefined;
}

function later() {
  document.addEventListener("visibilitychange", () => poll(), { once: true });
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("openrlhf-theme", root.dataset.theme);
  } catch { /* kept as long as the page */ }
  page.view?.retheme?.();
}

function showKeys() {
  const dialog = document.getElementById("keys");
  if (dialog.open) return dialog.close();
  dialog.replaceChildren(
    el("h2", { id: "keys-title" }, "Keys"),
    el("div", { class: "key-groups" }, KEYS.map(([title, keys]) =>
      el("section", {}, el("h3", {}, title), el("dl", {}, keys.map(([key, what]) => [
        el("dt", {}, key.split("  ").map((one) => el("kbd", {}, one))),
        el("dd", {}, what),
      ]))))),
    el("form", { method: "dialog" }, el("button", { class: "plain" }, "Close")));
  dialog.showModal();
  return undefined;
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest("input:not([type=radio]):not([type=checkbox]):not([type=range]), textarea, select");
  if (document.getElementById("keys").open) {
    if (event.key === "?") showKeys();
    return;
  }
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.target.type === "radio" && event.key.startsWith("Arrow")) return; // moves between the runs
  const views = { m: "curves", r: "rollouts", e: "events", s: "settings" };
  if (views[event.key]) go({ view: views[event.key] }, { push: true });
  else if (event.key === "d") switchTheme();
  else if (event.key === "?") showKeys();
  else if (event.key === "/") document.querySelector("main input[type=search]")?.focus();
  else if (!page.view?.key?.(event)) return;
  event.preventDefault();
}

async function begin() {
  document.getElementById("theme").addEventListener("click", switchTheme);
  document.getElementById("help").addEventListener("click", showKeys);
  document.getElementById("run-filter").addEventListener("input", drawRuns);
  document.getElementById("menu").addEventListener("click", () => {
    const open = document.body.classList.toggle("side-open");
    document.getElementById("menu").setAttribute("aria-expanded", String(open));
  });
  document.getElementById("main").addEventListener("click", () => document.body.classList.remove("side-open"));
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById("main").focus();
  });
  addEventListener("keydown", onKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.view?.retheme?.());
  onMove(show);
  try {
    [page.catalog, page.runs] = await Promise.all([ask("catalog"), ask("runs")]);
  } catch (error) {
    document.getElementById("main").append(el("p", { class: "empty" }, `The server does not answer: ${error.message}`));
    return;
  }
  show();
  await poll();
}

begin();

// Two views of what a run says in words: its events, and its settings.

import { ask, el, plural } from "./dom.js";

export const KINDS = {
  start: "start", restart: "restart", end: "end", warning: "warning", engine: "engine replaced", memory: "micro-batches cut",
  numbers: "not finite", checkpoint: "checkpoint", evaluation: "evaluation", note: "note",
};

export class EventsView {
  constructor(main, page) {
    this.page = page;
    this.main = main;
    this.kind = "";
  }

  update() {
    const { page } = this;
    const found = page.selected.flatMap((name) => (page.data.get(name)?.events ?? []).map((event) => ({ ...event, run: name })));
    const counts = {};
    for (const event of found) counts[event.kind] = (counts[event.kind] ?? 0) + 1;
    const chip = (kind, text) => el("button", { class: "chip", aria: { pressed: String(this.kind === kind) }, on: { click: () => {
      this.kind = kind;
      this.update();
    } } }, text);
    const rows = found
      .filter((event) => (this.kind ? event.kind === this.kind : true))
      .sort((a, b) => b.step - a.step || (b.clock ?? 0) - (a.clock ?? 0))
      .slice(0, 2000)
      .map((event) => el("li", { class: `event of-${event.kind}` },
        el("span", { class: "when" }, `step ${event.step.toLocaleString("en")}`, event.clock ? el("time", {}, new Date(event.clock * 1000).toLocaleString()) : null),
        el("span", { class: "kind" }, KINDS[event.kind] ?? event.kind),
        el("span", { class: "what" }, page.selected.length > 1 ? el("b", {}, `${event.run}: `) : null, event.text)));
    this.main.replaceChildren(
      el("h1", {}, "Events"),
      el("div", { class: "bar", role: "group", aria: { label: "Kinds of events" } }, chip("", `all ${found.length}`),
        Object.keys(KINDS).filter((kind) => counts[kind]).map((kind) => chip(kind, `${KINDS[kind]} ${counts[kind]}`))),
      rows.length ? el("ul", { class: "events-list" }, rows) : el("p", { class: "empty" }, "Nothing was said."));
  }
}

export class SettingsView {
  constructor(main, page) {
    this.page = page;
    this.main = main;
    this.settings = new Map();
    this.words = "";
    this.only = "set";
    this.search = el("input", { type: "search", placeholder: "Filter settings", aria: { label: "Filter settings" }, on: { input: () => {
      this.words = this.search.value.toLowerCase();
      this.draw();
    } } });
    this.which = el("select", { aria: { label: "Which settings" }, on: { change: () => {
      this.only = this.which.value;
      this.draw();
    } } }, el("option", { value: "set" }, "set to another value than the default"), el("option", { value: "differ" }, "different between the runs"), el("option", { value: "all" }, "all"));
    this.table = el("div", { class: "scroll" });
    main.append(el("h1", {}, "Settings"), el("div", { class: "bar" }, this.search, this.which), this.table);
  }

  async update({ fresh = false } = {}) {
    const missing = this.page.selected.filter((name) => !this.settings.has(name));
    if (fresh && !missing.length) return;
    for (const [name, found] of await Promise.all(missing.map(async (run) => [run, await ask("settings", { run })]))) this.settings.set(name, found);
    this.draw();
  }

  draw() {
    const runs = this.page.selected.filter((name) => this.settings.has(name));
    const value = (run, name) => this.settings.get(run).all[name] ?? this.settings.get(run).set[name];
    const names = [...new Set(runs.flatMap((run) => Object.keys(this.settings.get(run).all)))].filter((name) => {
      const differ = runs.some((run) => value(run, name) !== value(runs[0], name));
      const chosen = this.only === "all" || (this.only === "differ" ? differ : runs.some((run) => name in this.settings.get(run).set));
      return chosen && `${name} ${runs.map((run) => value(run, name)).join(" ")}`.toLowerCase().includes(this.words);
    });
    const row = (name) => {
      const differ = runs.some((run) => value(run, name) !== value(runs[0], name));
      return el("tr", { class: differ ? "differ" : "" }, el("th", { scope: "row" }, `--${name}`), runs.map((run) => el("td", {}, value(run, name) ?? "–")));
    };
    this.table.replaceChildren(names.length
      ? el("table", { class: "settings-table" }, el("caption", {}, plural(names.length, "setting")),
        el("thead", {}, el("tr", {}, el("td"), runs.map((run) => el("th", { scope: "col" }, el("i", { class: `swatch c${this.page.colour(run)}` }), run)))),
        el("tbody", {}, names.map(row)))
      : el("p", { class: "empty" }, runs.length ? "No setting is like that." : "No run is chosen."));
  }
}

// Rollouts: a table of groups with search, a group's samples side by side, and each sample as tokens or as a chat.

import { ask, debounce, el, kept, plural, short } from "./dom.js";
import { go, number, place } from "./place.js";
import { VirtualTable } from "./table.js";
import { availableColumns, bestColumn, chatView, COLUMNS, legend, recolour, scaleOf, tokenFacts, tokenView } from "./tokens.js";

const ORDERS = { newest: "newest first", oldest: "oldest first", reward_down: "highest reward", reward: "lowest reward", spread: "largest spread", length: "longest", failed: "most failures" };
const QUICK = ["is:failed", "is:truncated", "is:best", "is:worst"];
const NARROW = matchMedia("(max-width: 1000px)");

export class RolloutsView {
  constructor(main, page) {
    this.page = page;
    this.main = main;
    this.run = null;
    this.changes = -1;
    this.search = el("input", { type: "search", placeholder: "Search: words, \"a phrase\", step:10-20, reward<0.5, is:failed", value: place().q ?? "", aria: { label: "Search rollouts", describedby: "found" }, on: { input: debounce(150, () => {
      go({ q: this.search.value });
      this.refresh();
    }) } });
    this.order = el("select", { aria: { label: "Order" }, on: { change: () => {
      go({ order: this.order.value });
      this.refresh();
    } } }, Object.entries(ORDERS).map(([value, text]) => el("option", { value, selected: value === (place().order ?? "newest") }, text)));
    this.quick = el("div", { class: "quick", role: "group", aria: { label: "Quick filters" } }, QUICK.map((term) => el("button", { class: "chip", data: { term }, on: { click: () => this.toggle(term) } }, term.slice(3))));
    this.found = el("p", { id: "found", class: "found", role: "status" });
    this.table = new VirtualTable({
      label: "Groups",
      rowHeight: 58,
      fetchRows: (first, count) => this.ask({ first, count }),
      drawRow: (row) => this.row(row),
      onChoose: (row) => this.open(row, { push: NARROW.matches && number("step") === null }),
    });
    this.group = new GroupPane(page, () => this.back());
    main.append(
      el("div", { class: "list" }, el("div", { class: "bar" }, this.search, this.quick), el("div", { class: "found-line" }, this.found, this.order), this.table.element),
      this.group.element);
  }

  close() {
    this.table.close();
    this.closed = true;
  }

  toggle(term) {
    const words = this.search.value.split(/\s+/).filter(Boolean);
    this.search.value = (words.includes(term) ? words.filter((word) => word !== term) : [...words, term]).join(" ");
    go({ q: this.search.value });
    this.refresh();
  }

  ask(more) {
    return ask("groups", { run: this.run, q: place().q, order: place().order, ...more });
  }

  open(row, { push = false, sample = null } = {}) {
    go({ run: this.run, step: row.step, prompt: row.prompt, sample, side: null, token: null }, { push });
  }

  back() {
    go({ step: null, prompt: null, sample: null, side: null, token: null });
    this.table.element.focus();
  }

  /** After a move: another run, or another group. */
  update({ fresh = false } = {}) {
    if (fresh) return;
    const asked = place().q ?? "";
    if (asked !== this.search.value && document.activeElement !== this.search) {
      this.search.value = asked; // somebody went back in the browser's history
      this.refresh();
    }
    if (this.page.run && this.page.run !== this.run) {
      this.run = this.page.run;
      this.table.mark(-1);
      this.opened = false;
      this.changes = -1;
      this.refresh();
    }
    const open = number("step") !== null && number("prompt") !== null;
    this.main.classList.toggle("open", open);
    this.group.show(this.run);
  }

  /** At every look at the runs: rows that are new. */
  async tick() {
    if (!this.run || this.refreshing || (this.range && this.page.summary(this.run)?.status !== "running")) return;
    const answer = await this.ask({ first: 0, count: 1 });
    if (answer.changes !== this.changes) await this.refresh({ keepPlace: (place().order ?? "newest") === "newest" });
  }

  async refresh({ keepPlace = false } = {}) {
    if (!this.run || this.closed) return;
    const run = this.run;
    const asked = {};
    this.refreshing = asked;
    for (const chip of this.quick.children) chip.setAttribute("aria-pressed", String(this.search.value.split(/\s+/).includes(chip.dataset.term)));
    const at = { step: number("step"), prompt: number("prompt") };
    let answer;
    try {
      answer = await this.ask({ count: 100, ...(at.step !== null && at.prompt !== null && !keepPlace ? at : {}) });
    } catch (error) {
      this.found.textContent = error.message;
      this.found.classList.add("wrong");
      if (this.refreshing === asked) this.refreshing = null;
      return;
    }
    if (this.refreshing !== asked || run !== this.run) return;
    this.refreshing = null;
    const first = this.changes === -1;
    this.changes = answer.changes;
    this.range = answer.range;
    this.found.classList.remove("wrong");
    const share = answer.size ? answer.done / answer.size : 1;
    this.found.textContent = answer.of_samples || answer.groups
      ? `${plural(answer.groups, "group")} · ${plural(answer.samples, "sample")}${answer.samples < answer.of_samples ? ` of ${answer.of_samples.toLocaleString("en")}` : ""}${share < 1 ? ` · reading, ${Math.floor(share * 100)} %` : ""}`
      : share < 1 ? "reading …" : "This run has written no rollouts.";
    this.table.take(answer, { keepPlace: keepPlace && !first });
    if (answer.place !== null) this.table.mark(answer.place);
    else if (!keepPlace) this.table.mark(-1);
    if (share < 1) setTimeout(() => this.refresh({ keepPlace: true }), 300);
    this.main.dataset.shown = place().q ?? "";
    // On a wide screen the first group opens by itself, once it is known which one is the first.
    if (!this.opened && share === 1) {
      this.opened = true;
      if (!NARROW.matches && number("step") === null && answer.rows.length) this.table.choose(answer.first);
    }
  }

  row(row) {
    const [least, most] = this.range ?? [0, 1];
    const cells = row.samples.slice(0, 16).map((sample, i) => {
      const failed = row.outcomes[i] === "failed";
      const reward = row.rewards[i];
      const level = reward === null || most <= least ? 4 : Math.max(1, Math.round(((reward - least) / (most - least)) * 8));
      const kind = failed || reward === null ? "lost" : `s${level}`;
      const hit = row.matching.length < row.samples.length && row.matching.includes(sample);
      return el("i", { class: `cell ${kind} ${hit ? "hit" : ""}`, title: `sample ${sample}: ${failed ? "failed" : `reward ${short(reward)}`}${row.outcomes[i] === "truncated" ? ", truncated" : ""}` });
    });
    const failed = row.outcomes.filter((outcome) => outcome === "failed").length;
    const truncated = row.outcomes.filter((outcome) => outcome === "truncated").length;
    const lengths = row.lengths.filter((length) => length !== null);
    const mean = lengths.length ? lengths.reduce((a, b) => a + b, 0) / lengths.length : null;
    return el("div", {},
      el("span", { class: "row-step" }, row.step.toLocaleString("en")),
      el("span", { class: "row-text" }, row.text || "(no text)"),
      el("span", { class: "row-facts" },
        el("span", { class: "cells" }, cells),
        el("b", { title: "mean reward" }, short(row.reward)),
        el("span", { class: "faint" }, `${short(mean && Math.round(mean))} tok`),
        row.choice ? el("span", { class: `choice ${row.choice}` }, row.choice) : null,
        failed ? el("span", { class: "choice failed" }, `${failed} failed`) : null,
        truncated ? el("span", { class: "choice" }, `${truncated} cut`) : null));
  }

  key(event) {
    if (event.key === "j") this.table.step(1);
    else if (event.key === "k") this.table.step(-1);
    else if (event.key === "J" || event.key === "K") this.nextStep(event.key === "J");
    else if (event.key === "Escape" && (NARROW.matches || number("token") !== null)) {
      if (number("token") !== null) go({ token: null, ...(place().side ? { sample: null, side: null } : {}) });
      else this.back();
    } else return this.group.key(event);
    return true;
  }

  async nextStep(forward) {
    const step = number("step");
    if (step === null) return this.table.step(1);
    const answer = await ask("groups", { run: this.run, q: `${place().q ?? ""} step${forward ? ">" : "<"}${step}`, order: forward ? "oldest" : "newest", count: 1 });
    if (answer.rows.length) {
      this.open(answer.rows[0]);
      await this.refresh();
    }
    return undefined;
  }
}

/** The group that is open. */
class GroupPane {
  constructor(page, back) {
    this.page = page;
    this.tokens = new Map(); // sample → its tokens
    this.mode = kept.get("mode", "tokens");
    this.head = el("div", { class: "group-head" });
    this.bar = el("div", { class: "bar" });
    this.body = el("div", { class: "samples" });
    this.facts = el("div", { class: "facts", role: "status", aria: { label: "The token" }, hidden: true });
    this.backButton = el("button", { class: "plain back", on: { click: back } }, "← Groups");
    this.element = el("section", { class: "group", aria: { label: "Group" } }, this.backButton, this.head, this.bar, this.body, this.facts);
    this.body.addEventListener("pointerover", (event) => {
      const token = event.target.closest(".t");
      if (token) this.say(token);
    });
    this.body.addEventListener("pointerleave", () => this.say(this.body.querySelector(".t.at")));
    this.body.addEventListener("click", (event) => {
      const token = event.target.closest(".t");
      if (token) this.goToken(token.closest(".sample").dataset.sample, token.dataset.token);
    });
  }

  get shown() {
    const one = number("sample");
    const samples = this.group?.samples ?? [];
    return this.single && samples.some((sample) => sample.sample === one) ? samples.filter((sample) => sample.sample === one) : samples;
  }

  get single() {
    return number("sample") !== null && place().side === undefined;
  }

  async show(run) {
    const [step, prompt] = [number("step"), number("prompt")];
    if (!run || step === null || prompt === null) {
      this.opened = null;
      this.group = null;
      this.head.replaceChildren(el("p", { class: "empty" }, "Choose a group."));
      this.bar.replaceChildren();
      this.body.replaceChildren();
      this.facts.hidden = true;
      return;
    }
    const key = JSON.stringify([run, step, prompt]);
    if (key !== this.opened) {
      this.opened = key;
      this.tokens.clear();
      this.state = null;
      try {
        const group = await ask("group", { run, step, prompt });
        if (this.opened !== key) return;
        this.group = group;
      } catch (error) {
        if (this.opened !== key) return;
        this.group = null;
        this.head.replaceChildren(el("p", { class: "empty" }, error.message));
        this.bar.replaceChildren();
        this.body.replaceChildren();
        return;
      }
      this.drawHead(step, prompt);
    }
    if (this.group) await this.draw(run, step, prompt, key);
  }

  drawHead(step, prompt) {
    const { group } = this;
    const label = group.label === null || group.label === undefined ? null : typeof group.label === "string" ? group.label : JSON.stringify(group.label);
    this.head.replaceChildren(
      el("h1", {}, `Step ${step}, prompt ${prompt}`,
        group.choice ? el("span", { class: `choice ${group.choice}` }, group.choice) : null,
        group.reward !== null && group.reward !== undefined ? el("span", { class: "mean" }, `mean reward ${short(group.reward)} of ${plural(group.size, "sample")}`) : null),
      el("details", { class: "prompt", open: group.text.length < 600 }, el("summary", {}, "Prompt"), el("div", { class: "said" }, group.text),
        label ? el("p", { class: "label" }, el("b", {}, "Label "), label.length > 400 ? `${label.slice(0, 400)} …` : label) : null));
  }

  async draw(run, step, prompt, key) {
    const shown = this.shown;
    const wanted = shown.filter((sample) => sample.has_tokens && !this.tokens.has(sample.sample));
    if (this.mode === "tokens") {
      await Promise.all(wanted.map(async ({ sample }) => this.tokens.set(sample, await ask("tokens", { run, step, prompt, sample }).catch(() => null))));
    }
    if (this.opened !== key) return;
    this.columns = availableColumns([...this.tokens.values()]);
    this.column = this.columns.includes(place().column) ? place().column : bestColumn(this.columns);
    const read = shown.map((sample) => this.tokens.get(sample.sample)).filter(Boolean);
    const anyTokens = this.group.samples.some((sample) => sample.has_tokens);
    this.scale = scaleOf(this.column, read);
    const state = JSON.stringify([key, shown.map((sample) => sample.sample), this.mode]);
    this.drawBar(anyTokens);
    if (state !== this.state) {
      this.state = state;
      this.body.className = `samples ${shown.length > 1 ? "side" : "one"}`;
      this.body.replaceChildren(...shown.map((sample) => this.sample(sample, run)));
    } else if (this.mode === "tokens") {
      for (const card of this.body.children) {
        const tokens = this.tokens.get(Number(card.dataset.sample));
        if (tokens) recolour(card, tokens, this.scale);
      }
    }
    this.markToken();
  }

  drawBar(anyTokens) {
    const one = this.single ? number("sample") : null;
    const tab = (text, sample, title) => el("button", { class: "chip", title, aria: { pressed: String(one === sample) }, on: { click: () => go({ sample, side: null, token: null }) } }, text);
    const tabs = el("div", { class: "tabs", role: "group", aria: { label: "Samples" } }, this.group.samples.length > 1 ? tab("side by side", null, "all samples (0)") : null,
      this.group.samples.map((sample) => tab([`${sample.sample}`, el("small", {}, sample.outcome === "failed" ? "failed" : short(sample.reward))], sample.sample, `sample ${sample.sample}`)));
    const mode = el("button", { class: "chip", data: { mode: this.mode }, on: { click: () => this.switchMode() } }, this.mode === "tokens" && anyTokens ? "as chat" : "as tokens");
    mode.disabled = !anyTokens;
    const menu = el("select", { id: "column", aria: { label: "Colour by" }, on: { change: () => {
      go({ column: menu.value });
      menu.blur();
    } } }, this.columns.map((name) => el("option", { value: name, selected: name === this.column }, COLUMNS[name].title)));
    const coloured = this.mode === "tokens" && anyTokens;
    this.bar.replaceChildren(...[tabs, mode, coloured ? el("label", { class: "check", title: COLUMNS[this.column].about }, "Colour by ", menu) : null, coloured ? legend(this.scale) : null,
      anyTokens ? null : el("span", { class: "note" }, "This run has kept no tokens of this step.")].filter(Boolean));
  }

  sample(sample, run) {
    const tokens = this.tokens.get(sample.sample);
    const imageUrl = (file) => `api/image?${new URLSearchParams({ run, name: file.split("/").pop() })}`;
    const logs = Object.entries(sample.logs ?? {}).slice(0, 8).map(([name, value]) => `${name} ${short(value)}`);
    return el("article", { class: `sample ${sample.outcome}`, data: { sample: sample.sample }, aria: { label: `Sample ${sample.sample}` } },
      el("header", {}, el("b", {}, `Sample ${sample.sample}`), sample.agent ? el("span", { class: "agent" }, sample.agent) : null, el("span", { class: "reward" }, sample.reward === null ? "no reward" : `reward ${short(sample.reward)}`),
        sample.score !== null && sample.score !== sample.reward ? el("span", {}, `score ${short(sample.score)}`) : null,
        el("span", { class: "faint" }, plural(sample.length ?? 0, "token")), sample.outcome ? el("span", { class: `choice ${sample.outcome}` }, sample.outcome) : null,
        logs.length ? el("span", { class: "faint" }, logs.join(" · ")) : null),
      sample.error ? el("details", { class: "error", open: true }, el("summary", {}, sample.error.trim().split("\n").pop().slice(0, 200)), el("pre", {}, sample.error)) : null,
      this.mode === "tokens" && tokens ? tokenView(tokens, sample.turns, this.scale, imageUrl) : chatView(sample, tokens, imageUrl));
  }

  switchMode() {
    this.mode = this.mode === "tokens" ? "chat" : "tokens";
    kept.set("mode", this.mode);
    this.state = null;
    go({ token: null });
    this.show(this.page.run);
  }

  /** The token that the address names is marked, brought in sight, and spelled out. */
  markToken() {
    const at = number("token");
    const before = this.body.querySelector(".t.at");
    const card = this.body.querySelector(`.sample[data-sample="${number("sample") ?? this.shown[0]?.sample}"]`);
    const token = at === null ? null : card?.querySelector(`.t[data-token="${at}"]`);
    if (before !== token) before?.classList.remove("at");
    if (token && before !== token) {
      token.classList.add("at");
      // Once the browser knows how tall the turns before it are, which it finds out when they are drawn.
      const show = () => token.isConnected && token.scrollIntoView({ block: "nearest", inline: "nearest" });
      show();
      requestAnimationFrame(() => requestAnimationFrame(show));
    }
    this.say(token);
  }

  say(token) {
    // While another group is fetched, the tokens of the one before are still in sight.
    const tokens = token ? this.tokens.get(Number(token.closest(".sample").dataset.sample)) : null;
    this.facts.hidden = !tokens;
    if (!tokens) return;
    const facts = tokenFacts(tokens, Number(token.dataset.token));
    this.facts.replaceChildren(
      el("div", { class: "facts-head" }, el("code", {}, JSON.stringify(facts.text)), el("span", {}, `id ${facts.id}`), el("span", {}, `token ${facts.number}`),
        el("span", {}, facts.action ? (facts.trained ? "sampled, trained on" : "sampled, not trained on") : "read")),
      el("dl", {}, facts.facts.map((fact) => el("div", { class: fact.name === this.column ? "now" : "", title: fact.about }, el("dt", {}, fact.title), el("dd", {}, short(fact.value))))));
  }

  key(event) {
    if (!this.group || !this.columns) return false;
    const numbers = this.group.samples.map((sample) => sample.sample);
    const at = numbers.indexOf(number("sample"));
    if (/^[1-9]$/.test(event.key)) {
      const sample = numbers[Number(event.key) - 1];
      if (sample !== undefined) go({ sample, side: null, token: null });
    } else if (event.key === "0") go({ sample: null, token: null, side: null });
    else if (event.key === "]") go({ sample: numbers[Math.min(numbers.length - 1, at + 1)], side: null, token: null });
    else if (event.key === "[") go({ sample: numbers[Math.max(0, at - 1)], side: null, token: null });
    else if (event.key === "t") this.switchMode();
    else if (event.key === "c" || event.key === "C") {
      const all = this.columns;
      go({ column: all[(all.indexOf(this.column) + (event.key === "c" ? 1 : all.length - 1)) % all.length] });
    } else if (event.key === "ArrowRight" || event.key === "ArrowLeft") this.moveToken(event.key === "ArrowRight" ? 1 : -1);
    else return false;
    return true;
  }

  moveToken(by) {
    const sample = number("sample") ?? this.shown[0]?.sample;
    const all = [...this.body.querySelectorAll(`.sample[data-sample="${sample}"] .t`)];
    if (!all.length) return;
    const at = all.findIndex((token) => Number(token.dataset.token) === number("token"));
    // From nowhere the first token that was sampled.
    const next = at < 0 ? all.findIndex((token) => !token.classList.contains("read")) : Math.max(0, Math.min(all.length - 1, at + by));
    this.goToken(sample, all[Math.max(0, next)].dataset.token);
  }

  /** To a token, with as many samples in sight as before. */
  goToken(sample, token) {
    go({ sample, token, side: this.single || this.group.samples.length === 1 ? null : 1 });
  }
}

// Curves of every metric: runs over each other, smoothed, zoomed together, with marks where something happened.

import { clock, css, debounce, el, kept, short } from "./dom.js";
import { KINDS } from "./record.js";

const LOUD = ["warning", "restart", "engine", "memory", "numbers"]; // a line through the whole chart
const QUIET = ["evaluation", "checkpoint", "note", "start", "end"]; // a tick at its foot
const SECTIONS_FIRST = ["Rewards", "Evaluation in RL", "Supervised training", "Responses"];
const OWN = "Your own metrics";
const MACHINES = "Time and machines";
const HEIGHT = 206;

/** Mean of the past that forgets with every step; the beginning is not pulled towards 0. */
export function smooth(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

export class CurvesView {
  constructor(main, page) {
    this.page = page;
    this.charts = new Map(); // key → Chart
    this.zoom = null;
    this.smoothing = kept.get("smoothing", 0.6);
    this.log = kept.get("log", false);
    this.axis = kept.get("axis", "step");
    this.marks = new Set(kept.get("marks", LOUD));
    this.words = "";
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) entry.target.chart.seen(entry.isIntersecting);
    }, { rootMargin: "400px" });
    this.build(main);
  }

  build(main) {
    const slider = el("input", { type: "range", id: "smoothing", min: 0, max: 0.98, step: 0.02, value: this.smoothing, on: { input: () => {
      this.smoothing = Number(slider.value);
      said.textContent = this.smoothing.toFixed(2);
      kept.set("smoothing", this.smoothing);
      this.redraw();
    } } });
    const said = el("output", { for: "smoothing" }, this.smoothing.toFixed(2));
    this.logBox = el("input", { type: "checkbox", checked: this.log, on: { change: () => this.setLog(this.logBox.checked) } });
    this.axisBox = el("select", { aria: { label: "Horizontal axis" }, value: this.axis, on: { change: () => this.setAxis(this.axisBox.value) } },
      el("option", { value: "step", selected: this.axis === "step" }, "step"), el("option", { value: "time", selected: this.axis === "time" }, "time"));
    this.search = el("input", { type: "search", placeholder: "Filter metrics", aria: { label: "Filter metrics" }, on: { input: debounce(80, () => {
      this.words = this.search.value.toLowerCase().trim();
      this.update();
    }) } });
    this.whole = el("button", { class: "chip", hidden: true, on: { click: () => this.setZoom(null) } }, "Whole axis");
    this.marksBox = el("details", { class: "marks" }, el("summary", { class: "chip" }, "Marks"), el("div", { class: "popup" }, [...LOUD, ...QUIET].map((kind) => {
      const box = el("input", { type: "checkbox", checked: this.marks.has(kind), on: { change: () => {
        this.marks[box.checked ? "add" : "delete"](kind);
        kept.set("marks", [...this.marks]);
        for (const chart of this.charts.values()) chart.plot?.redraw(false);
      } } });
      return el("label", {}, box, el("i", { class: `mark ${kind}` }), KINDS[kind]);
    })));
    this.cards = el("div", { class: "cards" });
    this.body = el("div", { class: "sections" });
    main.append(
      this.cards,
      el("div", { class: "bar sticky" }, this.search,
        el("label", { class: "slider" }, "Smoothing ", slider, said),
        el("label", { class: "check" }, this.logBox, "Log axis"),
        el("label", { class: "check" }, "Over ", this.axisBox), this.marksBox, this.whole),
      this.body);
  }

  key(event) {
    if (event.key === "l") this.setLog(!this.log);
    else if (event.key === "x") this.setAxis(this.axis === "step" ? "time" : "step");
    else if (event.key === "Escape" && this.zoom) this.setZoom(null);
    else return false;
    return true;
  }

  setLog(log) {
    this.log = log;
    this.logBox.checked = log;
    kept.set("log", log);
    this.redraw({ anew: true });
  }

  setAxis(axis) {
    this.axis = axis;
    this.axisBox.value = axis;
    kept.set("axis", axis);
    this.setZoom(null);
    this.redraw({ anew: true });
  }

  setZoom(zoom) {
    this.zoom = zoom;
    this.whole.hidden = !zoom;
    for (const chart of this.charts.values()) chart.rescale();
  }

  retheme() {
    this.redraw({ anew: true });
  }

  redraw({ anew = false } = {}) {
    for (const chart of this.charts.values()) chart.stale({ anew });
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
    this.observer.disconnect();
  }

  /** The runs that are drawn: those that were chosen and read. */
  get runs() {
    return this.page.selected.filter((name) => this.page.data.has(name)).map((name) => ({ name, colour: this.page.colour(name), ...this.page.data.get(name) }));
  }

  update() {
    this.drawCards();
    const plans = this.plans();
    const state = JSON.stringify([plans.map((section) => [section.title, section.charts.map((plan) => plan.key)]), this.page.selected]);
    if (state !== this.state) {
      this.state = state;
      this.layout(plans);
    }
    this.redraw({ anew: this.selection !== this.page.selected.join("|") });
    this.selection = this.page.selected.join("|");
  }

  drawCards() {
    const card = (label, value, more = "") => (value === "–" || !value ? null : el("div", { class: "card" }, el("span", {}, label), el("strong", {}, value), el("small", {}, more)));
    const several = this.page.selected.length > 1;
    const rows = this.page.selected.slice(0, 8).map((name) => {
      const run = this.page.summary(name);
      if (!run) return null;
      return el("section", { class: "run-cards", aria: { label: name } },
        el("h1", {}, several ? el("i", { class: `swatch c${this.page.colour(name)}` }) : null, name,
          el("span", { class: `status ${run.status.split(":")[0].replace(/\W/g, "")}` }, run.status.split(":")[0])),
        several ? null : el("p", { class: "subtitle" }, [run.model, run.estimator, run.data].filter(Boolean).join(" · ")),
        run.status.includes(":") ? el("p", { class: "why" }, run.status) : null,
        el("div", { class: "card-row" },
          card("Steps", run.step.toLocaleString("en"), run.step_seconds ? `${short(run.step_seconds)} s the last` : ""),
          card("Time", clock(run.seconds)),
          run.score ? card("pass@1", short(run.score[1]), run.score[0].replace(/^eval_|_pass1$/g, "")) : null,
          run.headline ? card(run.headline[0], short(run.headline[1]), "last step") : null,
          card("Tokens / s", short(run.tokens_per_second), "last step"),
          card(several ? "Gap" : "Gap to the engine", short(run.gap), "nats per token")));
    });
    this.cards.className = several ? "cards several" : "cards";
    this.cards.replaceChildren(...rows.filter(Boolean));
  }

  /** Sections of charts, for the metrics that the chosen runs have logged. */
  plans() {
    const runs = this.runs;
    const names = { train: new Set(), eval: new Set() };
    for (const run of runs) for (const kind of ["train", "eval"]) for (const name of Object.keys(run[kind].values)) names[kind].add(name);
    const sections = new Map([...SECTIONS_FIRST, ...this.page.catalog.sections.map((section) => section.title).filter((title) => title !== MACHINES), OWN, MACHINES].map((title) => [title, []]));
    for (const run of runs) {
      if (Object.keys(run.train.values).some((name) => name.startsWith("timing/")) && this.fits("where the time of a step goes timing"))
        sections.get(MACHINES).push({ key: `time ${run.name}`, kind: "time", run: run.name, name: runs.length > 1 ? `Where the time goes: ${run.name}` : "Where the time of a step goes", about: "s" });
    }
    const order = [];
    for (const kind of ["train", "eval"]) {
      for (const name of names[kind]) {
        const found = this.described(name);
        const same = /^the same as `(.+)`$/.exec(found.meaning ?? "");
        if ((same && names[kind].has(same[1])) || name.startsWith("startup/") || !this.fits(`${name} ${found.meaning ?? ""}`)) continue;
        order.push({ key: `${kind} ${name}`, kind, name, unit: found.unit, about: found.meaning, section: found.section, rank: found.rank });
      }
    }
    // What never changes comes last in its section.
    const still = (plan) => runs.every((run) => {
      const values = run[plan.kind].values[plan.name] ?? [];
      const first = values.find((value) => value !== null);
      return values.every((value) => value === null || value === first);
    });
    for (const plan of order) plan.still = plan.kind === "train" && still(plan);
    order.sort((a, b) => a.still - b.still || a.rank - b.rank || a.name.localeCompare(b.name));
    for (const plan of order) sections.get(plan.section).push(plan);
    return [...sections].filter(([, charts]) => charts.length).map(([title, charts]) => ({ title, charts }));
  }

  fits(text) {
    return this.words.split(/\s+/).every((word) => text.toLowerCase().includes(word));
  }

  described(name) {
    this.known ??= new Map();
    if (!this.known.has(name)) {
      let rank = 0;
      let found = { section: OWN, rank: 1e6, said: -1 };
      for (const section of this.page.catalog.sections) {
        for (const metric of section.metrics) {
          rank += 1;
          metric.expression ??= new RegExp(`^(?:${metric.pattern})$`);
          // The name that says most: eval_<source>_response_length_mean before eval_<source>_mean.
          const said = metric.pattern.replaceAll(".*", "").length;
          if (said > found.said && metric.expression.test(name)) found = { section: section.title, rank, said, unit: metric.unit, meaning: metric.meaning };
        }
      }
      this.known.set(name, found);
    }
    return this.known.get(name);
  }

  layout(plans) {
    const wanted = new Set(plans.flatMap((section) => section.charts.map((plan) => plan.key)));
    for (const [key, chart] of this.charts) {
      if (!wanted.has(key)) {
        chart.close();
        this.charts.delete(key);
      }
    }
    const closed = new Set(kept.get("closed", []));
    const sections = plans.map(({ title, charts }) => {
      const cards = charts.map((plan) => {
        if (!this.charts.has(plan.key)) this.charts.set(plan.key, new Chart(this, plan));
        return this.charts.get(plan.key).element;
      });
      const details = el("details", { class: "section", open: !closed.has(title) || Boolean(this.words), on: { toggle: () => {
        closed[details.open ? "delete" : "add"](title);
        kept.set("closed", [...closed]);
      } } }, el("summary", {}, el("h2", {}, title), el("span", { class: "count" }, charts.length)), el("div", { class: "charts" }, cards));
      return details;
    });
    const nothing = this.words ? "No metric is called that." : this.page.selected.length ? "No step was finished yet." : "No run is chosen.";
    this.body.replaceChildren(...(sections.length ? sections : [el("p", { class: "empty" }, nothing)]));
  }
}

class Chart {
  constructor(view, plan) {
    this.view = view;
    this.plan = plan;
    this.visible = false;
    this.dirty = true;
    this.latest = el("span", { class: "latest" });
    this.holder = el("div", { class: "plot" });
    this.legend = el("ul", { class: "legend" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.wide = el("button", { class: "icon small", aria: { label: `Enlarge ${plan.name}` }, title: "Enlarge", on: { click: () => this.enlarge() } }, "⤢");
    const unit = plan.unit ? ` (${plan.unit})` : "";
    this.element = el("figure", { class: "chart", data: { metric: plan.name, kind: plan.kind } },
      el("figcaption", {}, el("b", { title: plan.about ? `${plan.about.replaceAll("`", "")}${unit}` : "" }, plan.name), el("span", { class: "unit" }, plan.unit ?? ""), this.latest, this.wide),
      plan.about && plan.kind !== "time" ? el("p", { class: "about" }, plan.about.replaceAll("`", "")) : null,
      this.holder, this.legend);
    this.holder.append(this.tip);
    this.element.chart = this;
    view.observer.observe(this.element);
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.holder);
  }

  enlarge() {
    const large = this.element.classList.toggle("large");
    this.wide.title = large ? "Make smaller" : "Enlarge";
    this.resize();
  }

  close() {
    this.view.observer.unobserve(this.element);
    this.sizes.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  seen(visible) {
    this.visible = visible;
    if (visible && this.dirty) this.draw();
  }

  stale({ anew }) {
    if (anew) {
      this.plot?.destroy();
      this.plot = null;
    }
    this.dirty = true;
    if (this.visible) this.draw();
  }

  get height() {
    return this.element.classList.contains("large") ? 420 : HEIGHT;
  }

  resize() {
    const width = this.holder.clientWidth;
    if (this.plot && width) this.plot.setSize({ width, height: this.height });
  }

  rescale() {
    if (!this.plot) return;
    const xs = this.plot.data[0];
    const [min, max] = this.view.zoom ?? [xs[0], xs[xs.length - 1]];
    if (min !== undefined) this.plot.setScale("x", { min, max: max > min ? max : min + 1 });
  }

  draw() {
    this.dirty = false;
    const built = this.plan.kind === "time" ? this.stacked() : this.lines();
    this.shown = built;
    const shape = built.series.map((one) => one.label).join("|");
    if (this.plot && this.shape === shape) {
      this.plot.setData(built.data, false);
      this.rescale();
    } else {
      this.plot?.destroy();
      this.shape = shape;
      this.plot = built.data[0].length ? new globalThis.uPlot(this.options(built), built.data, this.holder) : null;
      if (this.view.zoom) this.rescale();
    }
    this.say(null);
  }

  /** A curve per run, as logged (faint) and smoothed. */
  lines() {
    const { name, kind } = this.plan;
    const { log, smoothing, axis } = this.view;
    const runs = this.view.runs.filter((run) => run[kind].values[name]);
    const positive = runs.some((run) => run[kind].values[name].some((value) => value > 0));
    this.log = log && positive;
    const weight = kind === "eval" ? 0 : smoothing;
    const tables = runs.map((run) => {
      const xs = [];
      const values = [];
      run[kind].values[name].forEach((value, i) => {
        const x = axis === "time" ? run[kind].time[i] : run[kind].step[i];
        if (value === null || x === null) return;
        xs.push(x);
        values.push(value);
      });
      const drawable = (all) => (this.log ? all.map((value) => (value > 0 ? value : null)) : all);
      return weight ? [xs, drawable(values), drawable(smooth(values, weight))] : [xs, drawable(values)];
    });
    const data = tables.length > 1 ? globalThis.uPlot.join(tables) : tables[0] ?? [[]];
    const series = runs.flatMap((run) => {
      const stroke = css(`--c${run.colour}`);
      const few = run[kind].values[name].length < 60;
      const main = { label: run.name, stroke, width: 1.75, spanGaps: true, points: { show: kind === "eval" || few, size: kind === "eval" ? 6 : 4, fill: stroke }, run };
      if (!weight) return [main];
      return [{ label: `${run.name} as logged`, stroke, alpha: 0.28, width: 1, spanGaps: true, points: { show: few, size: 3, fill: stroke }, raw: true, run }, { ...main, points: { show: false } }];
    });
    return { data, series, runs };
  }

  /** The phases of a step on each other, and what no phase covers. */
  stacked() {
    const run = this.view.runs.find((one) => one.name === this.plan.run);
    const phases = this.view.page.catalog.phases;
    const { values, step, time } = run.train;
    const total = values["timing/step_total"];
    const mean = (name) => values[name].reduce((sum, value) => sum + (value ?? 0), 0);
    const names = Object.keys(values).filter((name) => name.startsWith("timing/") && name !== "timing/step_total").sort((a, b) => mean(b) - mean(a));
    const parts = names.map((name) => ({ label: phases[name.slice(7)] ?? name.slice(7), values: values[name].map((value) => value ?? 0) }));
    if (total) parts.push({ label: "other", values: total.map((whole, i) => Math.max(0, (whole ?? 0) - parts.reduce((sum, part) => sum + part.values[i], 0))) });
    const sums = [];
    parts.forEach((part, i) => sums.push(part.values.map((value, j) => value + (i ? sums[i - 1][j] : 0))));
    const xs = this.view.axis === "time" ? time : step;
    const colours = parts.map((part, i) => css(part.label === "other" ? "--c6" : `--c${[1, 2, 3, 4, 5, 7, 8][i % 7]}`));
    const reversed = [...parts.keys()].reverse(); // the highest sum first, so that lower ones are drawn over it
    const series = reversed.map((i) => ({ label: parts[i].label, stroke: colours[i], fill: colours[i], width: 0.5, points: { show: false }, own: parts[i].values, colour: colours[i], run }));
    this.log = false;
    return { data: [xs, ...reversed.map((i) => sums[i])], series, runs: [run], stacked: true };
  }

  options(built) {
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: css("--soft"), font, grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false } };
    const text = (value) => (this.view.axis === "time" ? clock(value) : short(value));
    const zero = built.stacked;
    return {
      width: this.holder.clientWidth || 340,
      height: this.height,
      legend: { show: false },
      padding: [8, 14, 0, 0],
      cursor: {
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
        y: false,
        sync: { key: "curves", setSeries: false },
        bind: { dblclick: () => () => this.view.setZoom(null) },
      },
      scales: {
        x: { time: false },
        y: this.log ? { distr: 3 } : { range: (u, min, max) => (zero ? [0, (max || 1) * 1.04] : spread(min, max)) },
      },
      axes: [
        { ...axis, values: (u, all) => all.map(text), size: 28, gap: 4, space: 56 },
        { ...axis, values: (u, all) => all.map((value) => (value === null ? "" : short(value))), size: (u, all) => 14 + 6.2 * Math.max(2, ...(all ?? []).map((one) => one.length)), gap: 4, space: 34 },
      ],
      series: [{}, ...built.series.map(({ run, raw, own, colour, ...rest }) => rest)],
      hooks: {
        draw: [(u) => this.drawMarks(u)],
        setSelect: [(u) => {
          if (u.select.width > 4) this.view.setZoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
        setCursor: [(u) => this.say(u.cursor.left >= 0 ? u.cursor.idx : null, u.cursor.event ? u : null)],
      },
    };
  }

  /** Events of the runs of this chart as {x, kind, text}. */
  marks() {
    const { axis, marks } = this.view;
    return this.shown.runs.flatMap((run) => run.events.filter((event) => marks.has(event.kind)).map((event) => {
      const at = axis === "time" ? run.train.time[Math.max(0, run.train.step.findLastIndex((step) => step <= event.step))] : event.step;
      return { ...event, x: at, run: run.name };
    }));
  }

  drawMarks(u) {
    const { ctx, bbox } = u;
    const scale = devicePixelRatio || 1;
    ctx.save();
    ctx.lineWidth = scale;
    for (const mark of this.marks()) {
      const x = Math.round(u.valToPos(mark.x, "x", true));
      if (!(x >= bbox.left - 1 && x <= bbox.left + bbox.width + 1)) continue;
      ctx.strokeStyle = ctx.fillStyle = css(`--mark-${mark.kind}`);
      const foot = bbox.top + bbox.height;
      ctx.beginPath();
      if (LOUD.includes(mark.kind)) {
        ctx.setLineDash([3 * scale, 3 * scale]);
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, foot);
        ctx.stroke();
        ctx.setLineDash([]);
        ctx.beginPath();
        ctx.moveTo(x - 4 * scale, bbox.top);
        ctx.lineTo(x + 4 * scale, bbox.top);
        ctx.lineTo(x, bbox.top + 6 * scale);
        ctx.fill();
      } else {
        ctx.fillRect(x - scale, foot - 7 * scale, 2 * scale, 7 * scale);
      }
    }
    ctx.restore();
  }

  /** The values at an index of the data beside the title, and under the mouse; without an index the latest. */
  say(index, hovered = null) {
    const built = this.shown;
    if (!built) return;
    const at = (i) => {
      const values = built.series[i].own ?? built.data[i + 1];
      if (index !== null && index !== undefined) return nearest(values, index);
      for (let j = values.length - 1; j >= 0; j -= 1) if (values[j] !== null && values[j] !== undefined) return values[j];
      return null;
    };
    const shown = [...built.series.keys()].filter((i) => !built.series[i].raw);
    if (built.stacked) shown.reverse();
    if (shown.length === 1 && !built.stacked) {
      const raw = built.series.length > 1 ? 0 : shown[0];
      this.latest.textContent = short(at(raw));
      this.legend.replaceChildren();
    } else {
      this.latest.textContent = "";
      this.legend.replaceChildren(...shown.map((i) => {
        const swatch = el("i", { class: "swatch" });
        swatch.style.backgroundColor = built.series[i].colour ?? built.series[i].stroke;
        return el("li", {}, swatch, built.series[i].label, el("b", {}, short(at(i))));
      }));
    }
    const over = hovered && this.holder.matches(":hover") && index !== null;
    this.tip.hidden = !over;
    if (!over) return;
    const x = built.data[0][index];
    const events = this.marks().filter((mark) => Math.abs(hovered.valToPos(mark.x, "x") - hovered.cursor.left) < 6);
    this.tip.replaceChildren(
      el("b", {}, this.view.axis === "time" ? clock(x) : `step ${x}`),
      ...built.series.map((series, i) => {
        const swatch = el("i", { class: "swatch" });
        swatch.style.backgroundColor = series.colour ?? series.stroke;
        if (series.raw) swatch.style.opacity = 0.4;
        const several = built.runs.length > 1 || built.stacked;
        const label = series.raw ? "as logged" : several ? series.label : built.series.length > 1 ? "smoothed" : this.plan.name;
        return el("div", {}, swatch, label, el("b", {}, short(at(i))));
      }),
      ...events.slice(0, 4).map((event) => el("div", { class: "said" }, el("i", { class: `mark ${event.kind}` }), `${KINDS[event.kind]}: ${event.text.slice(0, 160)}`)));
    const right = hovered.cursor.left > hovered.over.clientWidth / 2;
    this.tip.classList.toggle("left", right);
    const left = hovered.over.offsetLeft + hovered.cursor.left;
    this.tip.style.left = right ? "auto" : `${left + 12}px`;
    this.tip.style.right = right ? `${this.holder.clientWidth - left + 12}px` : "auto";
  }
}

function nearest(values, index) {
  for (let d = 0; d < 20; d += 1) {
    const before = values[index - d];
    if (before !== null && before !== undefined) return before;
  }
  return null;
}

/** Bounds with some air, also around a curve that never changes. */
function spread(min, max) {
  if (min === null || min === undefined) return [0, 1];
  const air = (max - min) * 0.06 || Math.abs(max) * 0.1 || 1;
  return [min >= 0 && min - air < 0 ? 0 : min - air, max + air];
}


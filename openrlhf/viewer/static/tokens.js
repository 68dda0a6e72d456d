// Tokens of a sample, coloured by one of their numbers; and the same sample as a chat.

import { el, plural, short, signed } from "./dom.js";

/** Columns by name: their title, how they are coloured, and what they mean. */
export const COLUMNS = {
  advantages: { title: "Advantage", scale: "diverging", about: "what the update took this token's advantage to be" },
  logprobs: { title: "Log-prob", scale: "rare", about: "log-prob as the engine sampled it" },
  gap: { title: "Engine – trainer gap", scale: "diverging", about: "log-prob of the engine less that of the trainer, before the update" },
  ratio: { title: "Ratio", scale: "ratio", about: "probability in the update over that before it" },
  entropy: { title: "Entropy", scale: "sequential", about: "entropy of the policy at this token" },
  mask: { title: "Mask", scale: "mask", about: "sampled by the policy, and trained on, or read by it" },
  versions: { title: "Weight version", scale: "classes", about: "version of the weights that sampled it" },
  rewards: { title: "Turn reward", scale: "diverging", about: "reward of a turn, on its last token" },
  kl: { title: "KL to the reference", scale: "diverging", about: "log-prob less that of the reference model" },
  values: { title: "Value", scale: "diverging", about: "what the critic said before the update" },
  returns: { title: "Return", scale: "diverging", about: "what the critic was trained towards" },
  shaped_rewards: { title: "Shaped reward", scale: "diverging", about: "reward after penalties and clip" },
  old_logprobs: { title: "Trainer's log-prob, before", scale: "rare", about: "the trainer's log-prob before the update" },
  new_logprobs: { title: "Trainer's log-prob, in the update", scale: "rare", about: "the trainer's log-prob in the update" },
  ref_logprobs: { title: "Reference log-prob", scale: "rare", about: "log-prob of the reference model" },
  is_weights: { title: "Correction weight", scale: "ratio", about: "factor of the off-policy correction" },
  clipped: { title: "Clipped", scale: "sequential", about: "1 where the clip of the loss took the gradient away" },
  losses: { title: "Loss", scale: "diverging", about: "policy loss of this token" },
};
const LEVELS = 8;
const CLASSES = 6;
const MOST_TOKENS = 40000; // elements that a page holds without becoming slow

export function availableColumns(samples) {
  const found = new Set(["mask"]);
  for (const sample of samples) for (const segment of sample?.segments ?? []) for (const name of Object.keys(segment.columns)) found.add(name);
  return Object.keys(COLUMNS).filter((name) => found.has(name));
}

export function bestColumn(names) {
  return ["advantages", "logprobs", "mask"].find((name) => names.includes(name));
}

function valueOf(segment, name, i) {
  if (name === "mask") return segment.action[i];
  return segment.columns[name]?.[i] ?? null;
}

/** How a column's numbers become colours: the same in all samples of a step. */
export function scaleOf(name, samples) {
  const kind = COLUMNS[name].scale;
  const top = samples.find((sample) => sample.scales[name])?.scales[name] ?? 1;
  const versions = kind === "classes" ? samples.flatMap((sample) => sample.segments.flatMap((segment) => segment.columns[name] ?? [])) : [];
  return { name, kind, top, seen: [...new Set(versions)].filter((value) => value >= 0).sort((a, b) => a - b) };
}

export function colourClass(scale, value) {
  if (value === null || value === undefined) return "";
  if (scale.kind === "mask") return value ? "k-action" : "k-read";
  if (scale.kind === "classes") return value < 0 ? "" : `k${scale.seen.indexOf(value) % CLASSES}`;
  const size = scale.kind === "ratio" ? Math.log(Math.max(value, 1e-9)) : value;
  const level = Math.min(LEVELS, Math.ceil((Math.abs(size) / scale.top) * LEVELS - 1e-9));
  if (!level) return "";
  if (scale.kind === "sequential" || scale.kind === "rare") return `s${level}`;
  return size < 0 ? `n${level}` : `p${level}`;
}

export function legend(scale) {
  const box = (name, text) => el("span", { class: "step" }, el("i", { class: name }), text);
  if (scale.kind === "mask") return el("div", { class: "scale" }, box("k-action", "sampled"), box("k-read", "read"));
  if (scale.kind === "classes") return el("div", { class: "scale" }, scale.seen.slice(0, 12).map((value) => box(`k${scale.seen.indexOf(value) % CLASSES}`, `version ${value}`)));
  const text = (part) => (scale.kind === "ratio" ? short(Math.exp(part * scale.top)) : short(part * scale.top * (scale.kind === "rare" ? -1 : 1)));
  const levels = Array.from({ length: LEVELS }, (_, i) => i + 1);
  const diverging = scale.kind === "diverging" || scale.kind === "ratio";
  return el("div", { class: "scale" },
    diverging ? [text(-1), el("span", { class: "ramp" }, [...levels].reverse().map((i) => el("i", { class: `n${i}` })), el("i"), levels.map((i) => el("i", { class: `p${i}` }))), text(1)]
      : [text(0), el("span", { class: "ramp" }, el("i"), levels.map((i) => el("i", { class: `s${i}` }))), text(1)]);
}

/** Turns as parts of the token sequences: {role, action, segment, start, end, reward, said}. */
export function turnsOf(sample, turns) {
  const lengths = sample.segments.map((segment) => segment.ids.length);
  const known = turns && turns.every((turn) => turn.role !== "left out")
    && lengths.every((length, s) => turns.filter((turn) => (turn.segment ?? 0) === s).reduce((sum, turn) => sum + turn.tokens, 0) === length);
  const found = [];
  sample.segments.forEach((segment, s) => {
    if (known) {
      let start = 0;
      for (const turn of turns.filter((one) => (one.segment ?? 0) === s)) {
        found.push({ ...turn, segment: s, start, end: start + turn.tokens });
        start += turn.tokens;
      }
      return;
    }
    const ends = new Set(segment.turn_ends);
    let start = 0;
    for (let i = 1; i <= segment.ids.length; i += 1) {
      if (i < segment.ids.length && segment.action[i] === segment.action[start] && !ends.has(i - 1)) continue;
      const action = Boolean(segment.action[start]);
      const rewards = (segment.columns.rewards ?? []).slice(start, i).filter((value) => value !== null);
      const versions = action ? [...new Set((segment.columns.versions ?? []).slice(start, i))] : [];
      found.push({ versions, role: action ? "assistant" : start ? "environment" : "prompt", action, segment: s, start, end: i, tokens: i - start, reward: action ? rewards.reduce((a, b) => a + b, 0) : 0 });
      start = i;
    }
  });
  return found;
}

function turnHead(turn) {
  return el("div", { class: "turn-head" }, el("b", {}, turn.role), el("span", {}, turn.tokens ? plural(turn.tokens, "token") : turn.role === "left out" ? "" : "not read"),
    turn.versions?.length ? el("span", {}, `version ${turn.versions.join(", ")}`) : null,
    turn.turns ? el("span", {}, `${plural(turn.turns, "turn")} left out`) : null,
    turn.action && turn.reward ? el("span", { class: `reward ${turn.reward > 0 ? "up" : "down"}` }, `reward ${signed(turn.reward)}`) : null);
}

/** Line breaks are seen where they are tokens. */
function visible(text) {
  return text === "" ? "␣" : text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
}

/** A sample's tokens. `first` tokens of each segment's images are shown as one. */
export function tokenView(sample, turns, scale, imageUrl) {
  let number = 0;
  const starts = sample.segments.map((segment) => {
    const at = number;
    number += segment.ids.length;
    return at;
  });
  let drawn = 0;
  const blocks = turnsOf(sample, turns).map((turn) => {
    const segment = sample.segments[turn.segment];
    const body = el("div", { class: "tokens" });
    if (turn.start === turn.end && turn.text) body.append(turn.text);
    for (let i = turn.start; i < turn.end; i += 1) {
      const image = segment.images.find((one) => one.start <= i && i < one.start + one.tokens);
      if (image) {
        if (i === image.start) body.append(picture(image.file, `image, ${plural(image.tokens, "token")}`, imageUrl));
        continue;
      }
      drawn += 1;
      if (drawn > MOST_TOKENS) continue;
      const token = el("span", { class: `t ${colourClass(scale, valueOf(segment, scale.name, i))}` }, visible(segment.texts[i]));
      token.dataset.token = starts[turn.segment] + i;
      if (!segment.action[i]) token.classList.add("read");
      body.append(token);
    }
    return el("section", { class: `turn ${turn.action ? "action" : ""}` }, turnHead(turn), body);
  });
  if (drawn > MOST_TOKENS) blocks.push(el("p", { class: "note" }, `${plural(drawn - MOST_TOKENS, "token")} more are in the file.`));
  return el("div", { class: "turns", role: "group", aria: { label: "Tokens" } }, blocks);
}

/** Colours anew, without new elements. */
export function recolour(element, sample, scale) {
  const flat = sample.segments.flatMap((segment) => segment.ids.map((_, i) => [segment, i]));
  for (const token of element.querySelectorAll(".t")) {
    const [segment, i] = flat[Number(token.dataset.token)];
    const extra = [segment.action[i] ? "" : "read", token.classList.contains("at") ? "at" : ""].filter(Boolean).join(" ");
    token.className = `t ${colourClass(scale, valueOf(segment, scale.name, i))} ${extra}`;
  }
}

/** All numbers of one token. */
export function tokenFacts(sample, number) {
  let left = number;
  for (const segment of sample.segments) {
    if (left < segment.ids.length) {
      const i = left;
      const facts = Object.keys(COLUMNS).filter((name) => name !== "mask" && segment.columns[name]?.[i] !== null && segment.columns[name]?.[i] !== undefined)
        .map((name) => ({ name, title: COLUMNS[name].title, about: COLUMNS[name].about, value: segment.columns[name][i] }));
      return { number, id: segment.ids[i], text: segment.texts[i], action: Boolean(segment.action[i]), trained: segment.trained, facts };
    }
    left -= segment.ids.length;
  }
  return null;
}

function picture(file, text, imageUrl) {
  const url = file ? imageUrl(file) : null;
  return el("span", { class: "picture" }, url ? el("img", { src: url, alt: text, loading: "lazy" }) : null, el("small", {}, text));
}

/** The sample as messages. */
export function chatView(sample, tokens, imageUrl) {
  let turns = sample.turns;
  if (!turns && tokens) {
    turns = turnsOf(tokens, null).map((turn) => ({ ...turn, text: tokens.segments[turn.segment].texts.slice(turn.start, turn.end).join("") }));
  }
  if (!turns) turns = [{ role: "response", action: true, text: sample.response ?? "", tokens: sample.length ?? 0 }];
  return el("div", { class: "turns chat" }, turns.map((turn) =>
    el("section", { class: `turn ${turn.action ? "action" : ""}` }, turnHead(turn),
      turn.text ? el("div", { class: "said" }, turn.text) : null,
      turn.images?.length ? el("div", { class: "pictures" }, turn.images.map((image) => picture(image.file, `image ${image.number}`, imageUrl))) : null)));
}

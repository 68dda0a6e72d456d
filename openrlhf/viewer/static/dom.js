// Elements, numbers and small things that every view uses. Texts become text nodes: nothing of a run is ever parsed as HTML.

/** An element: properties by name, `class`, `data`, `aria`, `on` apart; children are elements, texts, or nothing. */
export function el(name, options = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (value === undefined || value === null) continue;
    if (key === "class") element.className = value;
    else if (key === "data") Object.assign(element.dataset, value);
    else if (key === "aria") for (const [a, v] of Object.entries(value)) element.setAttribute(`aria-${a}`, v);
    else if (key === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (key === "role" || key === "for") element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A number as people read it: four digits, thousands apart. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${Math.round(value).toLocaleString("en")}`;
  if (size < 1e-3) return value.toExponential(2);
  const text = Number(value.toPrecision(4)).toString();
  return size >= 1000 ? Number(text).toLocaleString("en") : text;
}

export function signed(value) {
  return value > 0 ? `+${short(value)}` : short(value);
}

export function clock(seconds) {
  if (!(seconds >= 0)) return "–";
  const s = Math.round(seconds);
  const two = (n) => String(n).padStart(2, "0");
  if (s < 60) return `${s} s`;
  return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}

export function plural(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

export function debounce(milliseconds, work) {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...given), milliseconds);
  };
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** What the browser keeps between visits; where it keeps nothing, what the page itself remembers. */
const memory = new Map();
export const kept = {
  get(name, otherwise) {
    try {
      const text = localStorage.getItem(`openrlhf-${name}`);
      return text === null ? (memory.has(name) ? memory.get(name) : otherwise) : JSON.parse(text);
    } catch {
      return memory.has(name) ? memory.get(name) : otherwise;
    }
  },
  set(name, value) {
    memory.set(name, value);
    try {
      localStorage.setItem(`openrlhf-${name}`, JSON.stringify(value));
    } catch { /* kept in memory alone */ }
  },
};

/** An answer of the server. Its address begins with the page's own, which holds the token. */
export async function ask(name, parameters = {}, { signal } = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    if (value !== undefined && value !== null && value !== "") query.set(key, value);
  }
  const response = await fetch(`api/${name}?${query}`, { signal });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw Object.assign(new Error(body.detail || `${response.status} ${response.statusText}`), { status: response.status });
  return body;
}

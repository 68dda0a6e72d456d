// Where the reader is, as the hash of the address: a link to it opens the same run, step, sample and token.

const listeners = new Set();
let current = read();

function read() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

export function place() {
  return current;
}

export function number(name) {
  const text = current[name];
  return text !== undefined && /^-?\d+$/.test(text) ? Number(text) : null;
}

/** Move: names with null are left out. A step in the history only where `push` says so, so that Back is useful. */
export function go(changes, { push = false } = {}) {
  const next = { ...current };
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") delete next[name];
    else next[name] = String(value);
  }
  const hash = `#${new URLSearchParams(next)}`;
  if (hash === location.hash) return;
  current = next;
  history[push ? "pushState" : "replaceState"](null, "", hash);
  tell();
}

export function onMove(listener) {
  listeners.add(listener);
}

function tell() {
  for (const listener of listeners) listener(current);
}

addEventListener("popstate", () => {
  current = read();
  tell();
});
addEventListener("hashchange", () => {
  current = read();
  tell();
});

// A table of any length: only the rows in sight are elements, and rows are asked for a hundred at a time.

import { el } from "./dom.js";

const PAGE = 100;
const EXTRA = 8; // rows above and below those in sight

export class VirtualTable {
  /**
   * `fetchRows(first, count)` → {first, rows, groups}; `drawRow(row, index)` → element; `onChoose(row, index)`.
   */
  constructor({ label, rowHeight, fetchRows, drawRow, onChoose }) {
    Object.assign(this, { rowHeight, fetchRows, drawRow, onChoose });
    this.total = 0;
    this.pages = new Map();
    this.asked = new Set();
    this.chosen = -1;
    this.version = 0;
    this.inner = el("div", { class: "rows", role: "presentation" });
    this.element = el("div", { class: "table", role: "listbox", tabIndex: 0, aria: { label }, on: {
      scroll: () => this.draw(),
      click: (event) => {
        const row = event.target.closest("[data-index]");
        if (row) this.choose(Number(row.dataset.index));
      },
      keydown: (event) => {
        const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
        if (!move) return;
        event.preventDefault();
        event.stopPropagation();
        this.step(move);
      },
    } }, this.inner);
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.element);
  }

  close() {
    this.sizes.disconnect();
  }

  /** Take an answer: the number of rows, and some of them. Other rows are asked for again when they come in sight. */
  take(answer, { keepPlace = false } = {}) {
    const grown = answer.groups - this.total;
    this.version += 1;
    this.pages.clear();
    this.asked.clear();
    this.total = answer.groups;
    this.inner.style.height = `${this.total * this.rowHeight}px`;
    if (keepPlace && grown > 0 && this.element.scrollTop > 0) this.element.scrollTop += grown * this.rowHeight;
    this.keep(answer);
    this.draw();
  }

  keep(answer) {
    answer.rows.forEach((row, i) => {
      const index = answer.first + i;
      const page = Math.floor(index / PAGE);
      if (!this.pages.has(page)) this.pages.set(page, []);
      this.pages.get(page)[index % PAGE] = row;
    });
  }

  row(index) {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  async load(index) {
    const page = Math.floor(index / PAGE);
    if (this.asked.has(page)) return;
    this.asked.add(page);
    const version = this.version;
    try {
      const answer = await this.fetchRows(page * PAGE, PAGE);
      if (version !== this.version) return;
      this.keep(answer);
      this.draw();
    } catch {
      this.asked.delete(page);
    }
  }

  draw() {
    const { scrollTop, clientHeight } = this.element;
    const first = Math.max(0, Math.floor(scrollTop / this.rowHeight) - EXTRA);
    const last = Math.min(this.total, Math.ceil((scrollTop + clientHeight) / this.rowHeight) + EXTRA);
    const rows = [];
    for (let index = first; index < last; index += 1) {
      const row = this.row(index);
      if (!row) this.load(index);
      const element = row ? this.drawRow(row, index) : el("div", { class: "waiting" });
      element.classList.add("row");
      element.id = `row-${index}`;
      element.dataset.index = index;
      element.setAttribute("role", "option");
      element.setAttribute("aria-posinset", index + 1);
      element.setAttribute("aria-setsize", this.total);
      element.setAttribute("aria-selected", String(index === this.chosen));
      element.style.transform = `translateY(${index * this.rowHeight}px)`;
      rows.push(element);
    }
    this.inner.replaceChildren(...rows);
    if (this.chosen >= first && this.chosen < last) this.element.setAttribute("aria-activedescendant", `row-${this.chosen}`);
    else this.element.removeAttribute("aria-activedescendant");
  }

  /** Mark a row and bring it in sight, without telling anybody. */
  mark(index) {
    this.chosen = index;
    if (index >= 0) {
      const top = index * this.rowHeight;
      const { scrollTop, clientHeight } = this.element;
      if (top < scrollTop) this.element.scrollTop = top;
      else if (top + this.rowHeight > scrollTop + clientHeight) this.element.scrollTop = top + this.rowHeight - clientHeight;
    }
    this.draw();
  }

  async choose(index) {
    if (index < 0 || index >= this.total) return;
    if (!this.row(index)) await this.load(index);
    const row = this.row(index);
    if (!row) return;
    this.mark(index);
    this.onChoose(row, index);
  }

  step(by) {
    return this.choose(Math.max(0, Math.min(this.total - 1, this.chosen < 0 ? 0 : this.chosen + by)));
  }
}

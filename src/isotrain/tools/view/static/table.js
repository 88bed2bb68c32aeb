// The table of recorded trajectories: a page of rows at a time, sorted and filtered where the data is.
"use strict";

const PAGE_ROWS = 50;
const HEADINGS = [
  ["step", "Step", "Training step"],
  ["prompt_index", "Prompt", "Number of the prompt draw: rows with the same one are a group"],
  ["sample", "Sample", "Response of the group"],
  ["reward", "Reward", "After penalties: what advantages are computed from"],
  ["score", "Score", "Weighted sum of the rewards, before penalties"],
  ["advantage", "Advantage", "Empty where every token has its own"],
  ["length", "Tokens", "Tokens of the response"],
  ["prompt_length", "Prompt tokens", "Tokens of the prompt"],
  ["version", "Version", "Versions of the weights that wrote it"],
  ["finished", "End", "Whether the policy ended the response, or it was cut off"],
  ["failure", "Failure", "Why it could not be scored"],
  ["source", "Source", "Data set of the prompt"],
];

const table = {
  run: 0, filter: "", sort: "step", order: "down", offset: 0,
  rows: [], found: 0, selected: 0, revision: -1, highest: 1,

  open(query) {
    this.run = Math.min(Number(query.get("run") ?? 0), page.states.length - 1);
    this.filter = query.get("filter") ?? "";
    this.sort = HEADINGS.some(([name]) => name === query.get("sort")) ? query.get("sort") : "step";
    this.order = query.get("order") === "up" ? "up" : "down";
    this.offset = Math.max(0, Number(query.get("offset") ?? 0) || 0);
    if (document.activeElement !== byId("filter")) byId("filter").value = this.filter;
    byId("table-run").value = this.run;
    return this.load();
  },

  settings(changes) {
    const { run, filter, sort, order, offset } = { ...this, ...changes };
    return {
      run: run || null, filter, offset: offset || null,
      sort: sort === "step" ? null : sort, order: order === "down" ? null : order,
    };
  },

  change(changes, replace) {
    goTo("trajectories", this.settings({ offset: 0, ...changes }), replace);
  },

  async fetchPage(offset) {
    const query = { conditions: parseFilter(this.filter), sort: this.sort, order: this.order, offset, limit: PAGE_ROWS };
    return source.rows(this.run, query);
  },

  async load() {
    const problem = byId("filter-problem");
    const before = this.rows[this.selected];
    try {
      const told = await this.fetchPage(this.offset);
      Object.assign(this, { rows: told.rows, found: told.found, revision: told.revision });
      problem.hidden = true;
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
      return;
    }
    // New rows move the others: the same one stays selected.
    const same = (row) => before && row.step === before.step && row.rank === before.rank && row.index === before.index;
    this.selected = Math.max(0, this.rows.findIndex(same));
    this.draw();
  },

  async refresh(states) {
    if (states[this.run] && states[this.run].trajectories.revision !== this.revision) await this.load();
  },

  draw() {
    const last = this.offset + this.rows.length;
    byId("found").textContent = this.found
      ? `${(this.offset + 1).toLocaleString("en")}–${last.toLocaleString("en")} of ${this.found.toLocaleString("en")}` : "";
    byId("previous-page").disabled = this.offset === 0;
    byId("next-page").disabled = last >= this.found;
    byId("rows").hidden = !this.rows.length;
    byId("rows").tHead.replaceChildren(element("tr", {}, ...HEADINGS.map((heading) => this.heading(heading))));
    this.highest = fullBar(this.rows);
    byId("rows").tBodies[0].replaceChildren(...this.rows.map((row, i) => this.row(row, i)));
    this.drawEmpty();
    this.select(this.selected);
  },

  drawEmpty() {
    const state = page.states[this.run];
    const empty = byId("no-rows");
    empty.hidden = this.rows.length > 0;
    if (this.filter && state.trajectories.rows) empty.textContent = "No trajectory meets this filter.";
    else if (state.trajectories.pending) empty.textContent = "Reading the recorded files …";
    else if (state.recorded === false) {
      empty.textContent = "This run records no trajectories. Set rollout.record: true in its recipe.";
    } else empty.textContent = "No trajectory has been recorded yet.";
  },

  heading([name, text, title]) {
    const sorted = name === this.sort;
    const arrow = sorted ? (this.order === "down" ? " ▾" : " ▴") : "";
    const button = element("button", { type: "button", title, textContent: text + arrow });
    button.addEventListener("click", () =>
      this.change({ sort: name, order: sorted && this.order === "down" ? "up" : "down" }));
    const cell = element("th", { scope: "col" }, button);
    if (sorted) cell.ariaSort = this.order === "down" ? "descending" : "ascending";
    return cell;
  },

  row(row, i) {
    const made = element("tr", {}, ...HEADINGS.map(([name]) => this.cell(row, name)));
    made.addEventListener("click", () => {
      this.selected = i;
      this.openSelected();
    });
    return made;
  },

  cell(row, name) {
    if (name === "reward") return element("td", {}, rewardBar(row.reward, this.highest),
      element("span", { className: "amount", textContent: short(row.reward) }));
    if (name === "advantage") {
      const value = number(row.advantage);
      return element("td", { textContent: Number.isNaN(value) ? "" : short(value),
        className: value > 0 ? "good" : value < 0 ? "bad" : "" });
    }
    if (name === "version") {
      const range = row.version === row.newest ? `${row.version}` : `${row.version}–${row.newest}`;
      return element("td", { textContent: row.version < 0 ? "" : range });
    }
    if (name === "finished") return element("td", { textContent: ["cut off", "ended"][row.finished] ?? "",
      className: row.finished === 0 ? "warn" : "" });
    if (name === "failure") return element("td", { className: "bad text", textContent: row.failure ?? "" });
    if (name === "source") return element("td", { className: "text", textContent: row.source ?? "", title: row.source ?? "" });
    if (name === "score") return element("td", { textContent: short(row.score) });
    return element("td", { textContent: row[name] < 0 ? "" : row[name].toLocaleString("en") });
  },

  // Only keys scroll: a page that moves while new rows come in cannot be read.
  select(i, scroll) {
    if (!this.rows.length) return;
    this.selected = Math.min(Math.max(i, 0), this.rows.length - 1);
    const rows = byId("rows").tBodies[0].rows;
    for (const [at, row] of [...rows].entries()) row.classList.toggle("selected", at === this.selected);
    if (scroll) rows[this.selected]?.scrollIntoView({ block: "nearest" });
  },

  openSelected() {
    const row = this.rows[this.selected];
    if (row) goTo("episode", placeOf(row, this.run));
  },

  turnPage(by) {
    const offset = this.offset + by * PAGE_ROWS;
    if (offset >= 0 && offset < this.found) this.change({ offset });
  },

  // The row after or before the selected one, also on another page; null at the end.
  async neighbour(by) {
    if (!this.rows.length) return null;
    const wanted = this.selected + by;
    if (wanted < 0 || wanted >= this.rows.length) {
      const offset = this.offset + by * PAGE_ROWS;
      if (offset < 0 || offset >= this.found) return null;
      const told = await this.fetchPage(offset);
      if (!told.rows.length) return null;
      Object.assign(this, { rows: told.rows, found: told.found, offset });
      this.selected = by > 0 ? 0 : told.rows.length - 1;
    } else this.selected = wanted;
    return this.rows[this.selected];
  },
};

const placeOf = (row, run) => ({ run: run || null, step: row.step, rank: row.rank, index: row.index });

// The reward of a full bar: 1, as most rewards have it, or the largest of these rows.
function fullBar(rows) {
  const largest = Math.max(0, ...rows.map((row) => Math.abs(number(row.reward))).filter(Number.isFinite));
  return largest > 0.1 && largest < 1 ? 1 : largest || 1;
}

function rewardBar(reward, highest) {
  const value = number(reward);
  const bar = element("span", { className: `reward ${value < 0 ? "negative" : ""}` });
  bar.style.setProperty("--share", Number.isFinite(value) ? Math.min(1, Math.abs(value) / highest).toFixed(3) : 0);
  return bar;
}

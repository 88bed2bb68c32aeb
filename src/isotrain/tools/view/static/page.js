// The frame: which page is shown, keys, and the state of the runs, asked for again and again.
"use strict";

const SECONDS_BETWEEN = 2;

const page = {
  states: [],

  // Two runs of one recipe have the same name: then as much of the end of their paths as tells them apart.
  label(run) {
    const [first, second] = this.states.map((state) => state.path.split("/").filter(Boolean));
    if (!second || this.states[0].name !== this.states[1].name) return this.states[run].name;
    let parts = 1;
    while (parts < first.length && first.slice(-parts).join() === second.slice(-parts).join()) parts++;
    return [first, second][run].slice(-parts).join("/");
  },

  async show() {
    const { page: wanted, query } = readAddress();
    const name = ["curves", "trajectories", "episode"].includes(wanted) ? wanted : "curves";
    for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== name;
    for (const link of document.querySelectorAll("nav a")) {
      const here = link.dataset.page === name || (name === "episode" && link.dataset.page === "trajectories");
      if (here) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    byId("tip").hidden = true;
    if (name === "curves") curves.draw();
    else if (name === "trajectories") await table.open(query);
    else await episode.open(query);
  },

  drawHeader() {
    byId("runs").replaceChildren(...this.states.map((state, i) => {
      const last = state.metrics.last ?? 0;
      const dot = element("i", { className: "dot" });
      dot.style.backgroundColor = RUN_COLOURS[i];
      return element("span", { className: "run", title: state.path }, dot, element("b", { textContent: this.label(i) }),
        element("small", { textContent: `${state.algorithm} step ${last.toLocaleString("en")}${state.steps ? ` of ${state.steps.toLocaleString("en")}` : ""}` }));
    }));
    const rows = this.states.reduce((sum, state) => sum + state.trajectories.rows, 0);
    const pending = this.states.reduce((sum, state) => sum + state.trajectories.pending, 0);
    const shown = source.live ? "" : `${source.exportedRows.toLocaleString("en")} of `;
    const parts = [source.live ? "" : "exported",
      rows ? `${shown}${rows.toLocaleString("en")} trajector${rows === 1 ? "y" : "ies"}` : "", pending ? `reading ${count(pending, "file")}` : ""];
    byId("status").textContent = parts.filter(Boolean).join(" · ");
    document.title = `${this.states.map((_, i) => this.label(i)).join(", ")} · isotrain`;
    this.drawProblems();
  },

  drawProblems() {
    const told = this.states.flatMap(({ metrics, trajectories, problem }) =>
      [problem, metrics.problem, ...trajectories.problems,
        trajectories.more_problems ? `${count(trajectories.more_problems, "more file")} cannot be read` : null].filter(Boolean));
    byId("problems").hidden = !told.length;
    byId("problems").replaceChildren(...told.map((text) => element("li", { textContent: text })));
  },

  async poll() {
    const { runs } = await source.state();
    const same = JSON.stringify(runs) === JSON.stringify(this.states);
    this.states = runs;
    if (same) return;
    this.drawHeader();
    const select = byId("table-run");
    select.hidden = runs.length < 2;
    select.replaceChildren(...runs.map((_, i) => element("option", { value: i, textContent: this.label(i) })));
    select.value = table.run;
    await curves.refresh(runs);
    if (!byId("trajectories").hidden) await table.refresh(runs);
  },

  async keepPolling() {
    for (;;) {
      const reading = this.states.some((state) => state.trajectories.pending || !state.metrics.rows);
      await new Promise((done) => setTimeout(done, reading ? 500 : SECONDS_BETWEEN * 1000));
      if (document.hidden) continue;
      try {
        await this.poll();
        document.body.classList.remove("lost");
      } catch {
        document.body.classList.add("lost");
        byId("status").textContent = "isotrain view has ended: start it again";
      }
    }
  },

  help() {
    const help = byId("help");
    help.hidden = !help.hidden;
    byId("help-button").setAttribute("aria-expanded", !help.hidden);
  },
};

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches?.("input[type=search], select");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const here = ["curves", "trajectories", "episode"].find((name) => !byId(name).hidden);
  const keys = {
    "?": () => page.help(),
    1: () => goTo("curves"),
    2: () => goTo("trajectories", table.settings({})),
    "/": () => byId(here === "curves" ? "metric-search" : "filter").focus(),
    ...(here === "trajectories" && {
      j: () => table.select(table.selected + 1, true), k: () => table.select(table.selected - 1, true),
      ArrowDown: () => table.select(table.selected + 1, true), ArrowUp: () => table.select(table.selected - 1, true),
      Enter: () => table.openSelected(), n: () => table.turnPage(1), p: () => table.turnPage(-1),
    }),
    ...(here === "episode" && {
      j: () => episode.step(1), k: () => episode.step(-1), ArrowRight: () => episode.step(1), ArrowLeft: () => episode.step(-1),
      "]": () => episode.sibling(1), "[": () => episode.sibling(-1), Escape: () => episode.leave(),
      c: () => episode.colourBy(COLOURINGS[(COLOURINGS.indexOf(episode.colouring) + 1) % COLOURINGS.length]),
    }),
  };
  if (!keys[event.key] || (event.key === "Enter" && event.target.matches("button, a"))) return;
  event.preventDefault();
  keys[event.key]();
}

function listen() {
  addEventListener("hashchange", () => page.show());
  addEventListener("keydown", pressed);
  byId("help-button").addEventListener("click", () => page.help());
  byId("metric-search").addEventListener("input", () => curves.drawList());
  byId("default-metrics").addEventListener("click", () => curves.choose(null));
  byId("smoothing").value = curves.smoothing;
  byId("smoothing").addEventListener("input", (event) => {
    curves.smoothing = Number(event.target.value);
    remember("smoothing", curves.smoothing);
    curves.draw();
  });
  byId("logarithmic").checked = curves.logarithmic;
  byId("logarithmic").addEventListener("change", (event) => {
    curves.logarithmic = event.target.checked;
    remember("logarithmic", curves.logarithmic);
    curves.draw();
  });
  let typed;
  byId("filter").addEventListener("input", (event) => {
    clearTimeout(typed);
    typed = setTimeout(() => table.change({ filter: event.target.value.trim() }, true), 300);
  });
  byId("table-run").addEventListener("change", (event) => table.change({ run: Number(event.target.value) }));
  byId("previous-page").addEventListener("click", () => table.turnPage(-1));
  byId("next-page").addEventListener("click", () => table.turnPage(1));
  for (const button of document.querySelectorAll("[data-condition]")) {
    button.addEventListener("click", () => {
      const newest = `step=${page.states[table.run].trajectories.last ?? 0}`;
      const word = button.dataset.condition === "newest" ? newest : button.dataset.condition;
      const words = table.filter.split(/\s+/).filter(Boolean);
      const filter = (words.includes(word) ? words.filter((other) => other !== word) : [...words, word]).join(" ");
      byId("filter").value = filter;
      table.change({ filter });
    });
  }
  byId("columns").textContent = [...NUMERIC, ...TEXTUAL].join(" ");
}

async function start() {
  listen();
  try {
    await page.poll();
  } catch (error) {
    byId("status").textContent = error.message;
  }
  await page.show();
  document.body.classList.add("ready");
  if (source.live) page.keepPolling();
}

start();

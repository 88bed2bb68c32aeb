// Curves of metrics: what is drawn, and what is fetched for it (only rows that are new).
"use strict";

const PREFERRED = [
  "critic/rewards/mean", "critic/score/mean", "response_length/mean", "response_length/clip_ratio", "actor/entropy",
  "actor/kl_loss", "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm", "training/rollout_probs_diff_mean",
  "rollout/staleness/mean", "reward/failures", "train/loss", "train/accuracy", "train/margin", "train/grad_norm",
  "timing_s/step", "perf/throughput",
];
const RUN_COLOURS = ["var(--first)", "var(--second)"];
const isValidation = (name) => name.startsWith("val/") || name.startsWith("val-");

const curves = {
  runs: [], // of each run: { epoch, rows, names, curves: Map of name to { steps, values } }
  chosen: remembered("metrics", null),
  smoothing: remembered("smoothing", 0),
  logarithmic: remembered("logarithmic", false),
  hovered: null,

  // Validation metrics that belong into the chart of a training metric.
  companions(name) {
    const all = [...this.allNames()];
    if (name === "critic/score/mean" || name === "critic/rewards/mean") {
      return all.filter((other) => other.startsWith("val-core/"));
    }
    return name.startsWith("train/") ? all.filter((other) => other === `val/${name.slice(6)}`) : [];
  },

  allNames() {
    return new Set(this.runs.flatMap((run) => Object.keys(run.names)));
  },

  shown() {
    const all = this.allNames();
    const useful = (name) => all.has(name) && !this.isConstantZero(name) && !this.isRewardAgain(name);
    const names = this.chosen ?? PREFERRED.filter(useful).slice(0, 12);
    return names.filter((name) => all.has(name));
  },

  // By default no room is given to what was 0 all the time, such as failures that did not happen.
  isConstantZero(name) {
    const drawn = this.runs.map((run) => run.curves.get(name)).filter(Boolean);
    return drawn.length > 0 && drawn.every(({ values }) => values.length > 1 && values.every((value) => value === 0));
  },

  // Without penalties the score is the reward.
  isRewardAgain(name) {
    return name === "critic/score/mean" && this.runs.every(({ curves: own }) => {
      const [score, reward] = [own.get(name), own.get("critic/rewards/mean")];
      return score && reward && score.values.every((value, i) => value === reward.values[i]);
    });
  },

  async refresh(states) {
    while (this.runs.length < states.length) this.runs.push({ epoch: -1, rows: 0, names: {}, curves: new Map() });
    await Promise.all(states.map(async (state, i) => {
      const run = this.runs[i];
      const { rows, epoch, names } = state.metrics;
      if (run.epoch !== epoch || names !== Object.keys(run.names).length) run.names = (await source.names(i)).names;
      if (run.epoch !== epoch || run.rows < rows) await this.extend(i);
    }));
    await this.fetchMissing();
    this.draw();
  },

  // The new rows of all curves that are there already.
  async extend(i) {
    const run = this.runs[i];
    const told = await source.curves(i, [...run.curves.keys()], run.rows, run.epoch);
    if (told.epoch !== run.epoch) {
      run.curves.clear();
      Object.assign(run, { epoch: told.epoch, rows: told.all });
      return;
    }
    for (const [name, { steps, values }] of Object.entries(told.curves)) {
      appendTo(run.curves.get(name), steps, values);
    }
    run.rows = told.rows;
    if (told.rows < told.all) await this.extend(i);
  },

  async fetchMissing() {
    const wanted = this.chosen ? this.shown() : [...new Set([...this.shown(), ...PREFERRED])];
    const names = new Set(wanted.flatMap((name) => [name, ...this.companions(name)]));
    await Promise.all(this.runs.map(async (run, i) => {
      const missing = [...names].filter((name) => name in run.names && !run.curves.has(name));
      for (let at = 0; at < missing.length; at += 50) await this.fetchWhole(i, missing.slice(at, at + 50));
    }));
  },

  async fetchWhole(i, names) {
    const run = this.runs[i];
    const found = new Map(names.map((name) => [name, { steps: [], values: [] }]));
    for (let after = 0; ; ) {
      const told = await source.curves(i, names, after, run.epoch);
      if (told.epoch !== run.epoch) return; // the next refresh begins afresh
      for (const [name, { steps, values }] of Object.entries(told.curves)) appendTo(found.get(name), steps, values);
      after = told.rows;
      if (after >= told.all) break;
    }
    for (const [name, curve] of found) run.curves.set(name, curve);
  },

  async choose(names) {
    this.chosen = names;
    remember("metrics", names);
    await this.fetchMissing();
    this.draw();
  },

  draw() {
    if (byId("curves").hidden) return;
    this.drawList();
    const shown = this.shown();
    byId("charts").replaceChildren(...shown.map((name) => this.chart(name)));
    if (!shown.length) {
      const text = this.allNames().size ? "Choose metrics on the left." : "No step has been written yet.";
      byId("charts").append(element("p", { className: "empty", textContent: text }));
    }
    this.hover(this.hovered);
  },

  drawList() {
    const wanted = byId("metric-search").value.toLowerCase();
    const shown = new Set(this.shown());
    const groups = new Map();
    for (const name of [...this.allNames()].sort()) {
      if (!name.toLowerCase().includes(wanted)) continue;
      const prefix = name.includes("/") ? name.slice(0, name.indexOf("/")) : "";
      if (!groups.has(prefix)) groups.set(prefix, []);
      groups.get(prefix).push(name);
    }
    const signature = JSON.stringify([[...groups], [...shown]]);
    if (signature === this.listed) return; // a rebuilt list would lose the focus
    this.listed = signature;
    byId("metric-list").replaceChildren(...[...groups].map(([prefix, names]) =>
      element("fieldset", {}, element("legend", { textContent: visible(prefix || "other") }), ...names.map((name) => {
        const box = element("input", { type: "checkbox", checked: shown.has(name) });
        box.addEventListener("change", () => {
          const kept = this.shown().filter((other) => other !== name);
          this.choose(box.checked ? [...kept, name] : kept);
        });
        return element("label", { title: visible(name) }, box, visible(name.slice(prefix ? prefix.length + 1 : 0)));
      }))));
  },

  series(name) {
    return this.runs.flatMap((run, i) => [name, ...this.companions(name)].flatMap((metric) => {
      const curve = run.curves.get(metric);
      return curve ? [{ metric, run: i, points: isValidation(metric), curve }] : [];
    }));
  },

  chart(name) {
    const series = this.series(name);
    const close = element("button", { type: "button", textContent: "×", title: "Remove this chart" });
    close.addEventListener("click", () => this.choose(this.shown().filter((other) => other !== name)));
    const figure = element("figure", { className: "chart" },
      element("figcaption", {}, element("span", { className: "name", textContent: visible(name), title: visible(name) }),
        element("span", { className: "values" }), close));
    const plot = drawPlot(series, { smoothing: this.smoothing, logarithmic: this.logarithmic });
    figure.append(plot.svg);
    figure.plot = { ...plot, series };
    plot.svg.addEventListener("pointermove", (event) => {
      const box = plot.svg.getBoundingClientRect();
      this.hover(Math.round(plot.stepAt((event.clientX - box.left) / box.width)));
    });
    plot.svg.addEventListener("pointerleave", () => this.hover(null));
    plot.svg.addEventListener("click", () => {
      if (this.hovered !== null && page.states.some((state) => state.trajectories.rows)) {
        goTo("trajectories", { filter: `step=${this.hovered}` });
      }
    });
    return figure;
  },

  // The same step in all charts; without one, the newest values.
  hover(step) {
    this.hovered = step;
    for (const figure of document.querySelectorAll("#charts .chart")) {
      const { series, line, xOf } = figure.plot;
      line.setAttribute("visibility", step === null ? "hidden" : "visible");
      if (step !== null) for (const end of ["x1", "x2"]) line.setAttribute(end, xOf(step));
      const values = series.map(({ metric, run, points, curve }) => {
        const at = step === null ? curve.steps.length - 1 : nearest(curve.steps, step, points);
        const value = element("span", {
          textContent: `${points ? "◯ " : ""}${at < 0 ? "–" : short(curve.values[at])}`,
          title: `${page.states[run]?.name ?? ""} ${visible(metric)}`,
        });
        value.style.color = RUN_COLOURS[run];
        return value;
      });
      const told = step === null ? [] : [element("span", { className: "step", textContent: `step ${step}` })];
      figure.querySelector(".values").replaceChildren(...told, ...values);
    }
  },
};

// Two requests may bring the same rows; steps only grow, so that none is taken twice.
function appendTo(curve, steps, values) {
  steps.forEach((step, i) => {
    if (!curve.steps.length || step > curve.steps.at(-1)) {
      curve.steps.push(step);
      curve.values.push(values[i]);
    }
  });
}

// Place of a step; with `earlier` of the last one up to it; -1 if there is none.
function nearest(steps, step, earlier) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && (earlier || steps[low - 1] === step) ? low - 1 : -1;
}

function niceTicks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / size) * size; tick <= high + size * 1e-9; tick += size) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    sum = sum * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return sum / norm;
  });
}

// At most two points for each pixel, the lowest and the highest: a spike is never lost.
function thinned(points, width) {
  if (points.length <= width * 2) return points;
  const size = points.length / width;
  const kept = [];
  for (let i = 0; i < width; i++) {
    const some = points.slice(Math.floor(i * size), Math.floor((i + 1) * size));
    const low = some.reduce((a, b) => (b[1] < a[1] ? b : a)), high = some.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

const PLOT = { width: 400, height: 190, left: 50, right: 10, top: 8, bottom: 22 };

function drawPlot(series, { smoothing, logarithmic }) {
  const { width, height, left, right, top, bottom } = PLOT;
  const usable = (value) => Number.isFinite(value) && (!logarithmic || value > 0);
  const numbers = series.map(({ curve }) => curve.values.map(number));
  const steps = series.flatMap(({ curve }) => (curve.steps.length ? [curve.steps[0], curve.steps.at(-1)] : []));
  let first = Math.min(...steps), last = Math.max(...steps);
  if (!steps.length) [first, last] = [0, 1];
  if (first === last) [first, last] = [first - 1, last + 1];
  let low = Infinity, high = -Infinity;
  for (const values of numbers) {
    for (const value of values) if (usable(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  }
  const scale = logarithmic ? Math.log10 : (value) => value;
  if (low > high) [low, high] = logarithmic ? [0.1, 1] : [0, 1];
  let [bottomValue, topValue] = [scale(low), scale(high)];
  const margin = (topValue - bottomValue) * 0.06 || Math.abs(topValue) * 0.1 || 0.5;
  [bottomValue, topValue] = [bottomValue - margin, topValue + margin];
  const xOf = (step) => left + ((step - first) / (last - first)) * (width - left - right);
  const yOf = (value) => height - bottom - ((scale(value) - bottomValue) / (topValue - bottomValue)) * (height - top - bottom);
  const plot = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const tick of niceTicks(bottomValue, topValue, 4)) {
    const value = logarithmic ? 10 ** tick : tick, y = yOf(value);
    plot.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }),
      svg("text", { class: "tick", x: left - 5, y: y + 3.5, "text-anchor": "end" }, tickText(value)));
  }
  for (const tick of niceTicks(first, last, 6).filter(Number.isInteger)) {
    plot.append(svg("text", { class: "tick", x: xOf(tick), y: height - 6, "text-anchor": "middle" }, tick.toLocaleString("en")));
  }
  const path = (points, properties) => {
    const place = thinned(points, width).map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
    return svg("path", { d: place ? `M${place}` : "", stroke: "currentColor", fill: "none", ...properties });
  };
  series.forEach(({ run, points, curve }, i) => {
    const group = svg("g", {});
    group.style.color = RUN_COLOURS[run];
    const at = (values) => curve.steps.map((step, j) => [step, values[j]]).filter(([, value]) => usable(value))
      .map(([step, value]) => [xOf(step), yOf(value)]);
    const raw = at(numbers[i]);
    if (points || raw.length === 1) {
      group.append(path(raw, { "stroke-width": 1, "stroke-dasharray": "3 3" }));
      for (const [cx, cy] of raw.length > 400 ? [] : raw) group.append(svg("circle", { class: "validation", cx, cy, r: 3.2 }));
    } else if (smoothing > 0) {
      group.append(path(raw, { "stroke-width": 1, opacity: 0.25 }), path(at(smoothed(numbers[i], smoothing)), { "stroke-width": 1.8 }));
    } else group.append(path(raw, { "stroke-width": 1.5 }));
    const broken = curve.steps.filter((_, j) => !Number.isFinite(numbers[i][j])).slice(0, 200);
    for (const step of broken) {
      group.append(svg("text", { class: "not-finite", x: xOf(step), y: top + 8, "text-anchor": "middle" }, "✕"));
    }
    plot.append(group);
  });
  const line = svg("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  plot.append(line);
  const stepAt = (share) => {
    const inside = (share * width - left) / (width - left - right);
    return Math.min(last, Math.max(first, first + inside * (last - first)));
  };
  return { svg: plot, line, xOf, stepAt };
}

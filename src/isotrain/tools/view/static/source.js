// Where the data comes from: the server of `isotrain view`, or what `--export` wrote into this file.
"use strict";

// What the table's columns are called in filters, with shorter names for some.
const ALIASES = { prompt: "prompt_index", tokens: "length", group: "prompt_index", response: "sample" };
const NUMERIC = ["step", "prompt_index", "sample", "reward", "score", "advantage", "length", "trained",
  "prompt_length", "version", "newest", "finished", "row", "rank", "index"];
const TEXTUAL = ["failure", "source"];
const COMPARISONS = { "<=": "le", ">=": "ge", "!=": "ne", "<": "lt", ">": "gt", "=": "eq", "~": "has" };

// "reward<0.5 failure~time" to [["reward", "lt", "0.5"], ["failure", "has", "time"]].
function parseFilter(text) {
  const conditions = [];
  for (const [word] of text.matchAll(/(?:[^\s"]|"[^"]*")+/g)) {
    if (word === "failed") conditions.push(["failure", "ne", ""]);
    else if (word === "cut") conditions.push(["finished", "eq", "0"]);
    else {
      const found = /^([a-z_]+)(<=|>=|!=|<|>|=|~)(.*)$/.exec(word);
      if (!found) throw new Error(`“${word}” is not a condition; write for example reward<0.5`);
      const column = ALIASES[found[1]] ?? found[1];
      const value = found[3].replaceAll('"', "");
      const comparison = COMPARISONS[found[2]];
      if (NUMERIC.includes(column)) {
        if (comparison === "has" || value === "" || Number.isNaN(Number(value))) {
          throw new Error(`${column} is compared with a number: ${column}<0.5`);
        }
      } else if (!TEXTUAL.includes(column)) throw new Error(`there is no column ${column}`);
      else if (!["eq", "ne", "has"].includes(comparison)) throw new Error(`write ${column}=word or ${column}~part`);
      conditions.push([column, comparison, value]);
    }
  }
  return conditions;
}

function liveSource() {
  async function get(name, query) {
    const response = await fetch(`api/${name}?${new URLSearchParams(query)}`, { cache: "no-store" });
    const content = await response.json();
    if (!response.ok) throw new Error(content.error);
    return content;
  }
  return {
    live: true,
    state: () => get("state", []),
    names: (run) => get("names", { run }),
    curves: (run, names, after, epoch) =>
      get("metrics", [["run", run], ["after", after], ["epoch", epoch], ...names.map((name) => ["name", name])]),
    rows: (run, { conditions, sort, order, offset, limit }) =>
      get("rows", [["run", run], ["sort", sort], ["order", order], ["offset", offset], ["limit", limit],
        ...conditions.map((condition) => ["where", condition.join(":")])]),
    episode: (run, place) => get("episode", { run, ...place }),
    tokens: (run, place, part, start, number) => get("tokens", { run, ...place, part, start, count: number }),
    group: (run, step, promptIndex) => get("group", { run, step, prompt_index: promptIndex }),
    pieces: () => null,
  };
}

function exportedSource({ runs }) {
  const meets = {
    lt: (a, b) => a < b, le: (a, b) => a <= b, gt: (a, b) => a > b, ge: (a, b) => a >= b,
    eq: (a, b) => a === b, ne: (a, b) => a !== b, has: (a, b) => a.toLowerCase().includes(b.toLowerCase()),
  };
  function holds(row, [column, comparison, value]) {
    if (TEXTUAL.includes(column)) return meets[comparison](row[column] ?? "", value);
    return meets[comparison](number(row[column]) ?? NaN, Number(value));
  }
  function compare(a, b, sort, sign) {
    const [x, y] = TEXTUAL.includes(sort) ? [a[sort] ?? "", b[sort] ?? ""] : [number(a[sort]) ?? NaN, number(b[sort]) ?? NaN];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
    return (x < y ? -1 : x > y ? 1 : 0) * sign || b.step - a.step || a.prompt_index - b.prompt_index || a.sample - b.sample;
  }
  return {
    live: false,
    exportedRows: runs.reduce((sum, run) => sum + run.rows.length, 0),
    state: async () => ({ runs: runs.map((run) => run.state) }),
    names: async (run) => ({ names: runs[run].names }),
    curves: async (run, names) => {
      const curves = Object.fromEntries(names.filter((n) => n in runs[run].curves).map((n) => [n, runs[run].curves[n]]));
      const rows = runs[run].state.metrics.rows;
      return { epoch: 0, rows, all: rows, curves };
    },
    rows: async (run, { conditions, sort, order, offset, limit }) => {
      const found = runs[run].rows.filter((row) => conditions.every((condition) => holds(row, condition)));
      found.sort((a, b) => compare(a, b, sort, order === "down" ? -1 : 1));
      return { rows: found.slice(offset, offset + limit), found: found.length, all: runs[run].rows.length, revision: 0 };
    },
    episode: async (run, { step, rank, index }) => {
      const found = runs[run].episodes[`${step}-${rank}-${index}`];
      if (!found) throw new Error("this trajectory was not exported");
      return found;
    },
    tokens: async () => {
      throw new Error("these tokens were not exported: open the run with isotrain view");
    },
    group: async (run, step, promptIndex) =>
      ({ rows: runs[run].rows.filter((row) => row.step === step && row.prompt_index === promptIndex) }),
    pieces: (run) => runs[run].pieces,
  };
}

const exported = byId("exported");
const source = exported ? exportedSource(JSON.parse(exported.textContent)) : liveSource();

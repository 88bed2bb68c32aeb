// One episode: the prompt, then what the policy and its environment wrote, token by token.
"use strict";

const COLOURINGS = ["log-prob", "advantage", "version", "mask", "plain"];
// Special tokens that begin a turn in common chat templates.
const TURN = /start|user|assistant|system|tool|inst/i;
const VERSION_HUES = [210, 30, 140, 280, 350, 60, 180, 320];

const episode = {
  run: 0, content: null, group: [], pieces: [], colouring: remembered("colouring", "log-prob"), asked: 0,

  async open(query) {
    this.run = Math.min(Number(query.get("run") ?? 0), page.states.length - 1);
    const place = Object.fromEntries(["step", "rank", "index"].map((name) => [name, Number(query.get(name) ?? 0)]));
    const asked = ++this.asked;
    try {
      const content = await source.episode(this.run, place);
      if (asked !== this.asked) return; // another one was opened in the meantime
      this.content = content;
      this.group = [];
      this.takePieces(content.prompt);
      this.takePieces(content.response);
      this.draw();
      const told = await source.group(this.run, content.step, content.prompt_index);
      if (asked !== this.asked) return;
      this.group = told.rows;
      this.drawGroup();
    } catch (error) {
      byId("episode").replaceChildren(element("p", { className: "problem", textContent: error.message }));
    }
  },

  takePieces(tokens) {
    this.pieces[this.run] ??= new Map(Object.entries(source.pieces(this.run) ?? {}));
    for (const [id, piece] of Object.entries(tokens.pieces ?? {})) this.pieces[this.run].set(id, piece);
    tokens.masks ??= spread(tokens.mask ?? []);
    tokens.versions ??= spread(tokens.version ?? []);
  },

  draw() {
    const { content } = this;
    const talk = element("div", { id: "talk" }, ...this.blocks());
    if (content.no_text) talk.prepend(element("p", { className: "note", textContent: `Token ids are shown: ${content.no_text}.` }));
    talk.addEventListener("pointerover", (event) => this.tip(event));
    talk.addEventListener("pointerleave", () => { byId("tip").hidden = true; });
    byId("episode").replaceChildren(this.bar(),
      element("div", { className: "columns" }, talk, element("aside", {}, this.facts(), this.rewards(), this.turns(), element("div", { id: "group" }))));
    this.colour();
    this.drawGroup();
    byId("episode").scrollIntoView();
    scrollTo(0, 0);
  },

  bar() {
    const { content } = this;
    const button = (text, title, action) => {
      const made = element("button", { type: "button", textContent: text, title });
      made.addEventListener("click", action);
      return made;
    };
    const colours = element("span", { className: "choice", role: "group", ariaLabel: "Colour tokens by" },
      ...COLOURINGS.map((name) => {
        const made = button(name, "Colour tokens by this (c: next)", () => this.colourBy(name));
        made.dataset.colouring = name;
        return made;
      }));
    return element("div", { className: "bar" },
      button("← Table", "Back to the table (Esc)", () => this.leave()),
      button("‹", "Previous row of the table (k)", () => this.step(-1)), button("›", "Next row of the table (j)", () => this.step(1)),
      element("strong", { textContent: `Step ${content.step} · prompt ${content.prompt_index} · sample ${content.sample}` }),
      element("span", { className: "soft", textContent: `reward ${short(content.reward)}` }),
      element("span", { className: "space" }), element("span", { textContent: "Colour:" }), colours,
      element("span", { id: "colour-legend", className: "legend" }));
  },

  // Turns of the prompt, then runs of tokens of the policy and of its environment.
  blocks() {
    const { prompt, response } = this.content;
    const made = [];
    if (prompt.start > 0) made.push(this.more("prompt", `Show ${count(prompt.start, "earlier prompt token")}`));
    let turn = [];
    const endTurn = () => {
      if (turn.length) made.push(this.block("prompt", `Prompt${roleOf(turn)}`, turn));
      turn = [];
    };
    prompt.ids.forEach((id, i) => {
      const [text, special] = this.piece(id);
      if (special && TURN.test(text) && turn.length > 1) endTurn();
      turn.push(this.token(prompt, i, "prompt"));
    });
    endTurn();
    let from = 0;
    while (from < response.ids.length) {
      let to = from + 1;
      const own = response.masks[from] ?? true;
      while (to < response.ids.length && (response.masks[to] ?? true) === own) to++;
      const tokens = response.ids.slice(from, to).map((_, i) => this.token(response, from + i, "response"));
      const turn = own ? (this.content.episode?.turns ?? []).findIndex((one) => one.start <= from && from < one.end) : -1;
      const title = own ? `Policy${turn < 0 ? "" : ` · turn ${turn + 1}`}` : "Tool or environment";
      made.push(this.block(own ? "policy" : "environment", title, tokens));
      from = to;
    }
    const rest = response.all - response.start - response.ids.length;
    if (!response.all) made.push(element("p", { className: "note", textContent: "The response is empty." }));
    if (rest > 0) made.push(this.more("response", `Show ${count(rest, "more token")}`));
    return made;
  },

  block(kind, title, tokens) {
    return element("article", { className: `turn ${kind}` },
      element("h3", {}, title, element("small", { textContent: count(tokens.length, "token") })), element("pre", {}, ...tokens));
  },

  piece(id) {
    return this.pieces[this.run].get(String(id)) ?? [null, false];
  },

  token(tokens, i, part) {
    const [text, special] = this.piece(tokens.ids[i]);
    const shown = tokens.joined?.[i] ?? text;
    const made = element("span", { className: special ? "token special" : shown === null ? "token id" : "token" });
    // A part of a character that a later token completes still has a place to point at.
    const words = shown === null ? `${tokens.ids[i]} ` : shown === "" ? "◦" : shown;
    words.split("\n").forEach((line, n) => {
      if (n) made.append(element("i", { className: "newline", textContent: "⏎" }), "\n");
      made.append(line);
    });
    made.tokens = tokens;
    made.place = i;
    made.shownIn = part; // elements have a `part` of their own
    return made;
  },

  more(part, text) {
    const button = element("button", { type: "button", className: "more", textContent: text });
    button.addEventListener("click", async () => {
      const known = this.content[part];
      const place = { step: this.content.step, rank: this.content.rank, index: this.content.index };
      const size = part === "prompt" ? Math.min(known.start, 8000) : 8000;
      const start = part === "prompt" ? known.start - size : known.start + known.ids.length;
      try {
        const told = await source.tokens(this.run, place, part, start, size);
        this.takePieces(told);
        this.content[part] = part === "prompt" ? joinTokens(told, known) : joinTokens(known, told);
        byId("talk").replaceChildren(...this.blocks());
        this.colour();
      } catch (error) {
        button.textContent = error.message;
      }
    });
    return button;
  },

  facts() {
    const { content } = this;
    const { response } = content;
    const [oldest, newest] = [Math.min(...response.versions), Math.max(...response.versions)];
    const logps = response.logp.map(number).filter((value, i) => Number.isFinite(value) && (response.masks[i] ?? true));
    const mean = logps.reduce((sum, value) => sum + value, 0) / logps.length;
    const rows = [
      ["Reward", short(content.reward), "reward"], ["Advantage", content.advantage === null ? "one for each token" : short(content.advantage)],
      ["Score", short(content.score)], content.greedy === null ? null : ["Greedy score", short(content.greedy)],
      ["Response", `${count(response.all, "token")}, ${content.finished === false ? "cut off" : "ended"}`],
      ["Prompt", count(content.prompt.all, "token")],
      response.versions.length ? ["Weights", oldest === newest ? `version ${oldest}` : `versions ${oldest} to ${newest}`] : null,
      logps.length ? ["Mean log-prob", short(mean)] : null,
      ["Source", content.source ?? "–"], ["Data row", `${content.row ?? "–"}`], ["Seed", `${content.seed ?? "–"}`],
    ].filter(Boolean);
    const list = element("dl", {}, ...rows.flatMap(([name, value]) =>
      [element("dt", { textContent: name }), element("dd", { textContent: value })]));
    const box = element("div", { className: "box" }, list);
    if (page.states.length > 1) {
      const other = this.run ? 0 : 1;
      box.append(element("a", { href: `#trajectories?${new URLSearchParams({ run: other, filter: `row=${content.row}` })}`,
        textContent: `The same prompt in ${page.label(other)}` }));
    }
    return box;
  },

  rewards() {
    const { content } = this;
    const parts = content.parts.length
      ? element("dl", {}, ...content.parts.flatMap(([name, value]) =>
        [element("dt", { textContent: name }), element("dd", { textContent: short(value) })]))
      : element("p", { className: "note", textContent: "No parts were recorded." });
    const box = element("div", { className: "box" }, element("h3", { textContent: "Rewards, before weights" }), parts);
    if (content.failure !== null) {
      box.append(element("p", { className: "problem", textContent: `Not scored: ${content.failure}` }));
      if (content.detail) box.append(element("pre", { className: "detail", textContent: content.detail }));
    }
    return box;
  },

  // What an environment made of each turn, in recordings with agents.
  turns() {
    const told = this.content.episode;
    if (!told) return null;
    const cells = (tag, values) => element("tr", {}, ...values.map((value) => element(tag, { textContent: value })));
    const box = element("div", { className: "box" }, element("h3", {}, "Episode",
      element("small", { textContent: told.parts > 1 ? `sequence ${told.part + 1} of ${told.parts}` : "" })));
    if (told.reward !== null) box.append(element("p", { textContent: `Reward of the environment: ${short(told.reward)}` }));
    if (told.failure !== null) {
      box.append(element("p", { className: "problem", textContent: `Ended early: ${told.failure}` }));
      if (told.detail) box.append(element("pre", { className: "detail", textContent: told.detail }));
    }
    box.append(element("table", {}, cells("th", ["Turn", "Tokens", "Reward", "Calls", "Failed", "Seconds"]),
      ...told.turns.map((turn, i) => cells("td", [i + 1, turn.end - turn.start, short(turn.reward), short(turn.calls),
        short(turn.failures), short(turn.seconds)]))));
    return box;
  },

  drawGroup() {
    const box = byId("group");
    if (!box || !this.group.length) return;
    const { content, group } = this;
    const rewards = group.map((row) => number(row.reward)).filter(Number.isFinite);
    const highest = fullBar(group);
    const mean = rewards.reduce((sum, value) => sum + value, 0) / rewards.length;
    const seen = new Map();
    const items = group.map((row) => {
      seen.set(row.sample, (seen.get(row.sample) ?? 0) + 1);
      const several = group.filter((other) => other.sample === row.sample).length > 1;
      const title = `${row.sample}${several ? ` · sequence ${seen.get(row.sample)}` : ""}`;
      const end = row.end === null || row.end === undefined ? "" : row.end.trim().replace(/\s+/g, " ");
      const here = row.rank === content.rank && row.index === content.index;
      const made = element("a", { className: here ? "member here" : "member", href: "#" },
        element("span", { className: "line" }, element("b", { textContent: title }), rewardBar(row.reward, highest),
          element("span", { textContent: short(row.reward) }),
          element("span", { className: "tokens", textContent: row.failure ?? (row.finished === 0 ? "cut off" : count(row.length, "token")) })),
        element("span", { className: "end", textContent: end ? `… ${end}` : "" }));
      if (here) made.setAttribute("aria-current", "true");
      made.addEventListener("click", (event) => {
        event.preventDefault();
        this.replaceWith(row);
      });
      return made;
    });
    box.className = "box";
    box.replaceChildren(element("h3", {}, `Group of ${group.length}`,
      element("small", { textContent: rewards.length ? `mean reward ${short(mean)}` : "" })), ...items);
    const [side, here] = [box.closest("aside"), box.querySelector(".here")];
    if (here) side.scrollTop = Math.max(0, here.offsetTop + here.offsetHeight + 16 - side.clientHeight);
  },

  colourBy(name) {
    this.colouring = name;
    remember("colouring", name);
    this.colour();
  },

  colour() {
    for (const button of document.querySelectorAll("[data-colouring]")) {
      button.setAttribute("aria-pressed", button.dataset.colouring === this.colouring);
    }
    for (const token of document.querySelectorAll("#talk .token")) {
      token.style.backgroundColor = token.shownIn === "response" ? this.colourOf(token.tokens, token.place) : "";
    }
    byId("colour-legend").replaceChildren(...this.legend());
  },

  colourOf(tokens, i) {
    const own = tokens.masks[i] ?? true;
    if (this.colouring === "mask") return own ? "hsl(210 90% 55% / 0.25)" : "hsl(35 90% 50% / 0.3)";
    if (!own || this.colouring === "plain") return "";
    if (this.colouring === "log-prob") return unlikely(number(tokens.logp[i]));
    if (this.colouring === "version") return versionColour(tokens.versions[i]);
    const advantage = number(this.content.advantage);
    if (!Number.isFinite(advantage) || advantage === null) return "";
    return `hsl(${advantage > 0 ? 140 : 0} 75% 45% / ${Math.min(0.5, 0.06 + Math.abs(advantage) / 5).toFixed(3)})`;
  },

  legend() {
    const patch = (colour, text) => {
      const made = element("span", { className: "patch", textContent: text });
      made.style.backgroundColor = colour;
      return made;
    };
    if (this.colouring === "log-prob") return [1, 0.5, 0.1, 0.01].map((p) => patch(unlikely(Math.log(p)), `p = ${p}`));
    if (this.colouring === "mask") return [patch("hsl(210 90% 55% / 0.25)", "policy"), patch("hsl(35 90% 50% / 0.3)", "tool, no loss")];
    if (this.colouring === "version") {
      const versions = [...new Set(this.content.response.versions)].sort((a, b) => a - b);
      return versions.slice(0, 8).map((version) => patch(versionColour(version), `${version}`));
    }
    if (this.colouring === "advantage" && this.content.advantage === null) return ["one for each token: not recorded"];
    return [];
  },

  tip(event) {
    const token = event.target.closest?.(".token");
    const tip = byId("tip");
    tip.hidden = !token;
    if (!token) return;
    const { tokens, place: i, shownIn: part } = token;
    const logp = number(tokens.logp?.[i]);
    const [text] = this.piece(tokens.ids[i]);
    const lines = [[`token ${tokens.start + i} of the ${part}`, `id ${tokens.ids[i]}`]];
    if (text !== null) lines.push(["text", JSON.stringify(tokens.joined?.[i] ?? text)]);
    if (part === "response") {
      const own = tokens.masks[i] ?? true;
      if (own) lines.push(["log-prob", `${short(logp)}  (p = ${short(Math.exp(logp))})`]);
      lines.push(["written by", own ? `policy, version ${tokens.versions[i] ?? "–"}` : "tool or environment: no loss"]);
      if (own && this.content.advantage !== null) lines.push(["advantage", short(this.content.advantage)]);
    }
    tip.replaceChildren(...lines.map(([name, value]) =>
      element("div", {}, element("span", { textContent: name }), element("b", { textContent: value }))));
    const box = token.getBoundingClientRect();
    tip.style.left = `${Math.min(box.left, innerWidth - tip.offsetWidth - 8)}px`;
    const below = box.bottom + 6;
    tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : box.top - tip.offsetHeight - 6}px`;
  },

  leave() {
    goTo("trajectories", table.settings({ run: this.run }));
  },

  async step(by) {
    const row = table.run === this.run ? await table.neighbour(by) : null;
    if (row) this.replaceWith(row);
    else this.sibling(by);
  },

  sibling(by) {
    const at = this.group.findIndex((row) => row.rank === this.content?.rank && row.index === this.content?.index);
    const row = this.group[at + by];
    if (at >= 0 && row) this.replaceWith(row);
  },

  replaceWith(row) {
    goTo("episode", placeOf(row, this.run), true);
  },
};

// " · user", where a turn begins with a special token and a role, as in "<|im_start|>user".
function roleOf(turn) {
  const beginning = turn.slice(0, 8).map((token) => token.textContent).join("");
  const found = /^(?:<[^>]*>)*?<[^>]*?(?:\b(user|assistant|system|tool)\b[^>]*>|>(\w{1,16})(?:[⏎<]))/i.exec(beginning);
  return found ? ` · ${(found[1] ?? found[2]).toLowerCase()}` : "";
}

const spread = (runs) => runs.flatMap(([value, number]) => Array(number).fill(value));

function joinTokens(first, second) {
  const shift = first.ids.length;
  const moved = Object.entries(second.joined ?? {}).map(([place, text]) => [Number(place) + shift, text]);
  const joined = { ...first.joined, ...Object.fromEntries(moved) };
  const list = (name) => [...(first[name] ?? []), ...(second[name] ?? [])];
  return { start: first.start, all: first.all, joined, ids: list("ids"), logp: list("logp"),
    masks: list("masks"), versions: list("versions") };
}

// Certain tokens stay plain; the less likely a token was, the stronger its colour.
function unlikely(logp) {
  if (Number.isNaN(logp) || logp === undefined) return "hsl(300 80% 50% / 0.5)";
  const strength = Math.min(1, -logp / 6);
  return strength <= 0.005 ? "" : `hsl(${Math.round(45 - 40 * strength)} 90% 50% / ${(0.08 + 0.5 * strength).toFixed(3)})`;
}

const versionColour = (version) =>
  version === undefined ? "" : `hsl(${VERSION_HUES[((version % 8) + 8) % 8]} 80% 55% / 0.28)`;

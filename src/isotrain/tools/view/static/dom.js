// Elements, numbers and texts. Everything that comes from a run becomes a text node, never markup.
"use strict";

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Names of metrics come from a file: what cannot be seen, or turns the direction of text, is spelled out.
const visible = (text) => text.replace(/[\p{C}\u2028\u2029]/gu, (sign) => `\\u{${sign.codePointAt(0).toString(16)}}`);

const byId = (id) => document.getElementById(id);

// Numbers that JSON cannot hold arrive as words.
const NOT_FINITE = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const number = (value) => (typeof value === "string" ? NOT_FINITE[value] ?? NaN : value);

function short(value) {
  const x = number(value);
  if (x === null || x === undefined) return "–";
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  if (x === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return x.toExponential(2).replace("-", "−").replace("e−", "e-").replace("e+", "e");
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4;
  return (Number.isInteger(x) ? x.toLocaleString("en") : x.toFixed(digits)).replace("-", "−");
}

// Of an axis: no more digits than it takes.
const tickText = (value) => (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)
  ? Number(value.toPrecision(3)).toExponential().replace("e+", "e")
  : Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 })).replace("-", "−").replace("e−", "e-");

const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

// The part of the address behind "#": a page and its settings, so that going back and reloading work.
function readAddress() {
  const [page, query] = location.hash.slice(1).split("?");
  return { page: page || "curves", query: new URLSearchParams(query || "") };
}

function goTo(page, settings, replace) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(settings || {})) {
    if (value !== "" && value !== null && value !== undefined) query.set(name, value);
  }
  const hash = `#${page}${query.size ? `?${query}` : ""}`;
  // Both tell the page of the change by the event `hashchange`.
  if (replace) location.replace(hash);
  else location.hash = hash;
}

function remembered(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`isotrain.${name}`)) ?? otherwise;
  } catch {
    return otherwise; // no storage for pages that are files
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(`isotrain.${name}`, JSON.stringify(value));
  } catch {
    // the choice lasts as long as the page
  }
}

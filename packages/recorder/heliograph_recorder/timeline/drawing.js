// Shared by all scripts of the page: elements, numbers, scales, the tooltip.
"use strict";

let data, marks, domain, worked; // of what is shown: `show` sets them
const state = { axis: "step", logarithmic: new Set() }; // charts by name
const NEAR = 9; // marks within so many pixels are drawn as one
const MAX_MARKS = 8; // in one tooltip
const FIRST_ROWS = 15;

// Elements. Every text is set as text, never as markup.

const $ = (id) => document.getElementById(id);

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}
const html = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);
const svg = (tag, properties = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);

// Numbers.

const whole = (value) => value.toLocaleString("en-US");

function short(value) {
  if (typeof value !== "number") return value;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(size >= 1000 ? 6 : 4)));
}

function seconds(value) {
  if (value < 1e-4) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.0995) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 9.95) return `${value.toFixed(2)} s`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  if (value < 3570) return `${Math.floor(Math.round(value) / 60)} min ${Math.round(value) % 60} s`;
  const minutes = Math.round(value / 60);
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const clock = (value, span) =>
  span < 300 ? `${Number(value.toFixed(6))} s` : span < 18000 ? `${Number((value / 60).toFixed(4))} min` : `${Number((value / 3600).toFixed(4))} h`;

// Scales.

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 2.5, 5, 10].find((each) => each * power >= raw * 0.999) || 10);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) found.push(index * step + 0); // no -0
  return found;
}

function timeTicks(span, count) {
  const unit = span < 300 ? 1 : span < 18000 ? 60 : 3600;
  return ticks(0, span / unit, count).map((tick) => tick * unit);
}

function powers(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const each of Math.log10(high / low) < 2 ? [1, 2, 5] : [1]) found.push(each * 10 ** power);
  }
  const inside = found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  const every = Math.ceil(inside.length / 8);
  return inside.filter((_, index) => index % every === 0);
}

function steps() {
  let low = Infinity, high = -Infinity;
  const widen = (step) => { low = Math.min(low, step); high = Math.max(high, step); };
  for (const chart of data.charts) for (const curve of chart.curves) for (const piece of curve.pieces) piece.x.forEach(widen);
  for (const mark of data.marks) widen(mark[1]);
  for (const each of data.attempts) if (each.step) widen(each.step);
  if (data.reach) widen(data.reach);
  if (low > high) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

function xScale(left, right) {
  const [low, high] = domain[state.axis];
  return (value) => left + ((value - low) / (high - low)) * (right - left);
}

function xTicks(width) {
  const count = Math.max(2, Math.floor(width / 80));
  const [low, high] = domain[state.axis];
  if (state.axis === "step") {
    return ticks(low, high, count).filter(Number.isInteger).map((tick) => [tick, whole(tick)]);
  }
  if (data.runs) return timeTicks(high, count).map((tick) => [tick, clock(tick, high)]);
  return onAxis(count);
}

/** Ticks of the time in attempts, on an axis with gaps between attempts. */
function onAxis(count) {
  return timeTicks(worked, count).map((tick) => {
    let before = 0;
    for (const each of data.attempts) {
      if (tick <= before + each.seconds + 1e-9) return [each.start + tick - before, clock(tick, worked)];
      before += each.seconds;
    }
    return [data.end, clock(tick, worked)];
  });
}

// The tooltip.

const tip = $("tip");

function showTip(parts, x, y) {
  tip.replaceChildren(...parts);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth - 8 ? x - 14 - width : x + 14;
  const top = y + 14 + height > innerHeight - 8 ? y - 14 - height : y + 14;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}
const hideTip = () => { tip.hidden = true; };
const head = (text) => html("p", { class: "head" }, text);
const line = (text) => html("p", {}, text);
const pair = (name, value) => html("p", { class: "pair" }, html("span", {}, name), html("span", {}, value));

document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

/** Makes one of several nodes reachable by Tab, the others by the arrow keys; each shows a tooltip. */
function group(nodes) {
  nodes.forEach(([node, parts], index) => {
    node.setAttribute("tabindex", index ? "-1" : "0");
    const show = () => {
      const box = node.getBoundingClientRect();
      showTip(parts(), box.left + box.width / 2, box.top + box.height / 2);
    };
    node.addEventListener("focus", show);
    node.addEventListener("blur", hideTip);
    node.addEventListener("pointerenter", (event) => showTip(parts(), event.clientX, event.clientY));
    node.addEventListener("pointermove", (event) => event.stopPropagation());
    node.addEventListener("pointerleave", hideTip);
    node.addEventListener("keydown", (event) => {
      const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: nodes.length - 1 }[event.key];
      if (to === undefined || !nodes[to]) return;
      event.preventDefault();
      nodes.forEach(([each], number) => each.setAttribute("tabindex", number === to ? "0" : "-1"));
      nodes[to][0].focus();
    });
  });
}

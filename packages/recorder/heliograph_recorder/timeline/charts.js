// Charts: curves over steps or time.

const HUES = { train: "train", validation: "validation", "each batch": "batch" };

function hues(curves) {
  let others = 0;
  return curves.map((curve) => {
    if (curve.hue) return `${curve.hue}${{ train: "", "each batch": " faint" }[curve.split] ?? " dashed"}`;
    const known = HUES[curve.split];
    return known && curves.filter((each) => each.split === curve.split).length === 1 ? known : `other-${others++ % 3}`;
  });
}

let charts = [];

/** Makes the charts of what is shown; one that is there already is kept. */
function buildCharts() {
  const former = new Map(charts.map((view) => [view.chart.name, view]));
  charts = data.charts.map((chart, number) => Object.assign(former.get(chart.name) || buildChart(chart.name), aboutChart(chart, number)));
  charts.forEach((view) => {
    view.box.classList.toggle("wide", view.height === 300);
    view.toggle.disabled = !view.values.some((value) => value > 0);
    view.key.replaceChildren(...view.chart.curves.map((curve, index) => html("li", {}, swatch(view.classes[index]), ...legend(curve))));
  });
  $("charts").replaceChildren(...charts.map((view) => view.box));
}

function aboutChart(chart, number) {
  const values = chart.curves.flatMap((curve) => curve.pieces.flatMap((piece) => piece.y)).filter((value) => typeof value === "number");
  return { chart, number, values, classes: hues(chart.curves), height: number === 0 || data.charts.length === 2 ? 300 : 210 };
}

function buildChart(name) {
  const view = {
    toggle: html("input", { type: "checkbox", onchange: () => { state.logarithmic[view.toggle.checked ? "add" : "delete"](name); drawChart(view); } }),
    key: html("ul", { class: "key" }),
    picture: svg("svg", { role: "group", "aria-label": `${name}: curves with marks` }),
  };
  view.box = html(
    "div", { class: "card chart", "data-chart": name },
    html("div", { class: "head" }, html("h3", {}, name), view.key, html("label", {}, view.toggle, "log scale")),
    view.picture,
  );
  view.picture.addEventListener("pointermove", (event) => hover(view, event));
  view.picture.addEventListener("pointerleave", () => { hideTip(); charts.forEach((each) => each.cross.setAttribute("visibility", "hidden")); });
  return view;
}

function swatch(hue) {
  return svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, svg("line", { class: `swatch ${hue}`, x1: 1, x2: 13, y1: 7, y2: 7 }));
}

function legend(curve) {
  const last = kept(curve).y.at(-1);
  const drawn = curve.pieces.reduce((sum, piece) => sum + piece.x.length, 0);
  const thinned = drawn < curve.total ? ` (${whole(drawn)} of ${whole(curve.total)} points)` : "";
  return [[curve.split || curve.metric, curve.name].filter(Boolean).join(" · "), html("b", {}, last === undefined ? "" : short(last)), thinned].filter((each) => each !== "");
}

/** The points of a curve that were not lost, in one piece. */
function kept(curve) {
  if (!curve.kept) {
    const pieces = curve.pieces.filter((piece) => !piece.lost);
    curve.kept = { x: pieces.flatMap((each) => each.x), t: pieces.flatMap((each) => each.t), y: pieces.flatMap((each) => each.y) };
  }
  return curve.kept;
}

const along = (points) => (state.axis === "step" ? points.x : points.t);

function yScale(view, top, bottom) {
  const logarithmic = state.logarithmic.has(view.chart.name);
  const usable = view.values.filter((value) => !logarithmic || value > 0);
  let low = usable.reduce((one, other) => Math.min(one, other), Infinity);
  let high = usable.reduce((one, other) => Math.max(one, other), -Infinity);
  if (low > high) [low, high] = [0, 1];
  if (low === high) [low, high] = logarithmic ? [low / 2, high * 2] : [low - (Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];
  const bend = logarithmic ? Math.log10 : (value) => value;
  const slack = (bend(high) - bend(low)) * 0.04;
  const [from, to] = [bend(low) - slack, bend(high) + slack];
  const scale = (value) => bottom - ((bend(value) - from) / (to - from)) * (bottom - top);
  const found = logarithmic ? powers(10 ** from, 10 ** to) : ticks(from, to, Math.max(3, Math.round((bottom - top) / 34)));
  return { scale, ticks: found, shows: (value) => typeof value === "number" && (!logarithmic || value > 0) };
}

function drawChart(view) {
  const { picture, chart, height } = view;
  const width = Math.max(280, view.box.clientWidth - 30);
  const area = { left: 52, right: width - 10, top: 22, bottom: height - 44 };
  const x = xScale(area.left, area.right);
  const y = yScale(view, area.top, area.bottom);
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.setAttribute("height", height);
  picture.replaceChildren();
  drawBands(picture, x, area);
  drawAxes(picture, x, y, area, width, height);
  const lanes = [clusters(marks.filter((mark) => !isCheckpoint(mark.kind)), x), clusters(marks.filter((mark) => isCheckpoint(mark.kind)), x)];
  for (const cluster of lanes.flat()) {
    if (["stop", "best", "return", "fork"].includes(cluster.kind)) {
      picture.append(svg("line", { class: `rule ${cluster.kind}`, x1: cluster.at, x2: cluster.at, y1: area.top - 4, y2: area.bottom + 12 }));
    }
  }
  chart.curves.forEach((curve, index) => drawCurve(picture, curve, view.classes[index], x, y, area));
  view.cross = svg("line", { class: "cross", y1: area.top, y2: area.bottom, visibility: "hidden" });
  picture.append(view.cross);
  const nodes = [[lanes[0], 11], [lanes[1], area.bottom + 12]].flatMap(([found, at]) => found.map((cluster) => [markNode(cluster, at), () => about(cluster)]));
  picture.append(...nodes.map(([node]) => node));
  group(nodes);
  Object.assign(view, { x, area, width });
}

function drawBands(picture, x, area) {
  const band = (name, from, to, title) => picture.append(
    svg("rect", { class: name, x: from, y: area.top, width: Math.max(0, to - from), height: area.bottom - area.top }, svg("title", {}, title)),
  );
  if (state.axis === "time") {
    for (const each of data.attempts.slice(1)) band("gap", x(each.start - data.gap), x(each.start), `between attempts: ${each.gap}`);
  } else {
    for (const each of data.returns) if (each.left > each.step) band("undone", x(each.step), x(each.left), `lost: steps ${each.step} to ${each.left}`);
  }
}

function drawAxes(picture, x, y, area, width, height) {
  for (const tick of y.ticks) {
    const at = y.scale(tick);
    picture.append(
      svg("line", { class: "grid", x1: area.left, x2: area.right, y1: at, y2: at }),
      svg("text", { x: area.left - 8, y: at + 4, "text-anchor": "end" }, short(Number(tick.toPrecision(12)))),
    );
  }
  picture.append(svg("line", { class: "base", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }));
  for (const [tick, text] of xTicks(area.right - area.left)) {
    const at = x(tick);
    picture.append(svg("line", { class: "base", x1: at, x2: at, y1: area.bottom, y2: area.bottom + 4 }));
    const anchor = at > width - 30 ? "end" : "middle";
    picture.append(svg("text", { x: anchor === "end" ? area.right + 8 : at, y: height - 8, "text-anchor": anchor }, text));
  }
  picture.append(svg("text", { x: 2, y: height - 8 }, state.axis));
}

/** Where a point at some step lies on a curve as it is drawn; null outside of it. */
function onCurve(points, step, x, y) {
  const after = points.x.findIndex((each) => each >= step);
  const ends = [points.x[after] === step ? after : after - 1, after];
  if (after < 0 || ends[0] < 0 || !ends.every((each) => y.shows(points.y[each]))) return null;
  const [[left, from], [right, to]] = ends.map((each) => [x(points.x[each]), y.scale(points.y[each])]);
  return [x(step), right > left ? from + ((to - from) * (x(step) - left)) / (right - left) : to];
}

/** The points of a fork from where it parts from its parent, and the point of the parent's curve there. */
function parted(curve, x, y) {
  const { step, curve: parent } = curve.parent;
  const points = kept(curve);
  const first = points.x.findIndex((each) => each >= step);
  const from = first < 0 ? points.x.length : first;
  const begin = points.x[from] > step ? onCurve(kept(parent), step, x, y) : null;
  return [{ x: points.x.slice(from), t: points.t.slice(from), y: points.y.slice(from) }, begin];
}

function drawCurve(picture, curve, hue, x, y, area) {
  const bySteps = state.axis === "step";
  const isParted = bySteps && curve.parent;
  const lost = curve.pieces.filter((piece) => piece.lost);
  const runs = isParted ? [parted(curve, x, y)] : bySteps ? [[kept(curve)]] : curve.pieces.filter((piece) => !piece.lost).map((piece) => [piece]);
  const draw = (points, name, begin) => {
    const xs = along(points);
    let path = begin ? `M${begin.map((each) => each.toFixed(2))}` : "", alone = 0, isOpen = Boolean(begin);
    const dots = [];
    points.y.forEach((value, index) => {
      const at = x(xs[index]);
      if (!y.shows(value)) {
        isOpen = false;
        if (typeof value !== "number") picture.append(brokenMark(at, area.top, name, curve.metric, value, points.x[index]));
        return;
      }
      const height = y.scale(value);
      path += `${isOpen ? "L" : "M"}${at.toFixed(2)},${height.toFixed(2)}`;
      alone = isOpen ? 0 : alone + 1;
      isOpen = true;
      dots.push([at, height]);
    });
    picture.append(svg("path", { class: `curve ${name}`, d: path, "data-metric": curve.metric }));
    if (dots.length && dots.length <= 60) picture.append(...dots.map(([at, height]) => svg("circle", { class: `dot ${name}`, cx: at.toFixed(2), cy: height.toFixed(2), r: 2.2 })));
  };
  lost.forEach((piece) => draw(piece, `lost ${hue}`));
  runs.forEach(([piece, begin]) => draw(piece, hue, begin));
}

function brokenMark(at, top, name, metric, value, step) {
  const label = svg("title", {}, `${metric} is ${value} at step ${whole(step)}`);
  return svg("path", { class: `broken ${name}`, d: `M${at - 3},${top - 3}l6,6m0,-6l-6,6`, "data-metric": metric }, label);
}

function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
}

function hover(view, event) {
  const box = view.picture.getBoundingClientRect();
  const at = ((event.clientX - box.left) / box.width) * view.width;
  const [low, high] = domain[state.axis];
  const wanted = low + ((at - view.area.left) / (view.area.right - view.area.left)) * (high - low);
  const found = view.chart.curves.map((curve) => [curve, kept(curve)]).filter(([, points]) => points.x.length)
    .map(([curve, points]) => { const index = nearest(along(points), wanted); return { curve, step: points.x[index], at: along(points)[index], value: points.y[index] }; });
  if (!found.length) return;
  const closest = found.reduce((one, other) => (Math.abs(other.at - wanted) < Math.abs(one.at - wanted) ? other : one));
  for (const each of charts) {
    each.cross.setAttribute("x1", each.x(closest.at));
    each.cross.setAttribute("x2", each.x(closest.at));
    each.cross.setAttribute("visibility", "visible");
  }
  const rows = found.map((each) => pair([each.curve.metric, each.curve.name].filter(Boolean).join(" · ") + (each.step === closest.step ? "" : ` (step ${whole(each.step)})`), short(each.value)));
  showTip([head(`step ${whole(closest.step)}`), ...rows], event.clientX, event.clientY);
}

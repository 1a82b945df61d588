// The page: its header, and drawing all of it.

const list = (id, texts, classes) => $(id).append(...texts.map((text) => html("li", { class: classes }, text)));

function drawHead() {
  document.title = data.runs ? data.runs.map((run) => run.name).join(", ") : `${data.run}: ${data.ended}`;
  $("run").textContent = data.run;
  $("parent").textContent = data.parent?.text ?? "";
  $("parent").hidden = !data.parent;
  $("status").textContent = data.ended;
  $("status").className = `status ${data.status}`;
  $("why").replaceChildren(...data.why.map(line));
  $("warnings").replaceChildren();
  list("warnings", data.warnings);
  $("warnings").hidden = !data.warnings.length;
  for (const part of ["facts", "metrics"]) {
    $(part).replaceChildren(...data[part].map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))));
  }
  const kinds = RANK.filter((kind) => marks.some((mark) => mark.kind === kind));
  $("key").replaceChildren(...kinds.map((kind) => html("li", {}, svg("svg", { viewBox: "-7 -7 14 14", "aria-hidden": "true" }, glyph(kind)), NAMES[kind])));
  if (data.charts.some((chart) => chart.curves.some((curve) => curve.pieces.some((piece) => piece.lost)))) {
    $("key").append(html("li", {}, svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, svg("line", { class: "curve lost", x1: 0, x2: 14, y1: 7, y2: 7 })), "lost work"));
  }
  if (!data.charts.length) $("charts").append(html("p", { class: "empty" }, "No metric was recorded."));
  $("notes").replaceChildren();
  list("notes", data.notes);
  list("notes", data.damage, "damage");
  $("remarks").hidden = !$("notes").childElementCount;
  $("footer").textContent = `${data.file}`;
}

function draw() {
  charts.forEach(drawChart);
  drawStrip();
}

/** Draws again; where an element had the focus, its successor gets it. */
function redraw() {
  const focusable = () => [...document.querySelectorAll("[tabindex], button, input, a")];
  const former = focusable().indexOf(document.activeElement);
  draw();
  if (former >= 0 && !document.activeElement?.matches("[tabindex], button, input, a")) focusable()[former]?.focus();
}

/** Shows the facts of a run. */
function show(facts) {
  data = facts;
  marks = allMarks();
  domain = { step: steps(), time: [0, data.longest || data.end || 1] };
  worked = data.attempts.reduce((sum, each) => sum + each.seconds, 0);
  buildCharts();
  drawHead();
  drawTotals();
  drawParts();
  drawTables();
  redraw();
}

$("axis").addEventListener("change", (event) => { state.axis = event.target.value; hideTip(); draw(); });
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; hideTip(); requestAnimationFrame(draw); } });
const embedded = JSON.parse($("data").textContent);
if (!embedded.live) show(embedded);

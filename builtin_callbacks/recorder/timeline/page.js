// The page: its header, and drawing all of it.

function drawHead() {
  document.title = `${data.run}: ${data.verdict}`;
  $("run").textContent = data.run;
  $("status").textContent = data.verdict;
  $("status").classList.add(data.status);
  $("why").append(...data.why.map(line));
  $("warnings").append(...data.warnings.map((text) => html("li", {}, text)));
  $("warnings").hidden = !data.warnings.length;
  for (const part of ["facts", "metrics"]) {
    $(part).append(...data[part].map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))));
  }
  const kinds = RANK.filter((kind) => marks.some((mark) => mark.kind === kind));
  $("key").append(...kinds.map((kind) => html("li", {}, svg("svg", { viewBox: "-7 -7 14 14", "aria-hidden": "true" }, glyph(kind)), NAMES[kind])));
  if (data.charts.some((chart) => chart.curves.some((curve) => curve.pieces.some((piece) => piece.lost)))) {
    $("key").append(html("li", {}, svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, svg("line", { class: "curve lost", x1: 0, x2: 14, y1: 7, y2: 7 })), "lost work"));
  }
  if (!data.charts.length) $("charts").append(html("p", { class: "empty" }, "No metric was recorded."));
  $("notes").append(...data.notes.map((text) => html("li", {}, text)), ...data.damage.map((text) => html("li", { class: "damage" }, text)));
  $("remarks").hidden = !$("notes").childElementCount;
  $("footer").textContent = `${data.file}`;
}

function draw() {
  hideTip();
  charts.forEach(drawChart);
  drawStrip();
}

drawHead();
drawTotals();
drawTables();
draw();
$("axis").addEventListener("change", (event) => { state.axis = event.target.value; draw(); });
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; requestAnimationFrame(draw); } });

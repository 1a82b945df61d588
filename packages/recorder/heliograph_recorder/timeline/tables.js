// The strip of phases, and the tables.

// Phases.

const phaseClass = (kind) => (kind === "validation" ? "validating" : kind);

function drawStrip() {
  const width = Math.max(280, $("strip").clientWidth), height = 66;
  const at = (time) => (data.end ? (time / data.end) * width : 0);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "phases of the run over time" });
  const nodes = data.phases.map(([kind, attempt, begin, end, step]) => {
    const label = `${kind}, ${seconds(end - begin)}`;
    const node = svg("rect", { class: `slice ${phaseClass(kind)}`, x: at(begin).toFixed(2), y: 18, width: Math.max(0.5, at(end) - at(begin)).toFixed(2), height: 26, role: "img", "aria-label": label });
    return [node, () => [head(label), line(`attempt ${attempt}, until step ${whole(step)}`)]];
  });
  for (const each of data.attempts) {
    const room = at(each.start + each.seconds) - at(each.start);
    if (room > 62) picture.append(svg("text", { x: at(each.start), y: 12 }, `attempt ${each.number}`));
    if (each.number > 1) {
      const gap = svg("rect", { class: "between", x: at(each.start - data.gap).toFixed(2), y: 18, width: Math.max(1, at(data.gap)).toFixed(2), height: 26, role: "img", "aria-label": `between attempts, ${each.gap}` });
      nodes.push([gap, () => [head("between attempts"), line(each.gap || "of unknown length")]]);
    }
  }
  nodes.sort(([one], [other]) => Number(one.getAttribute("x")) - Number(other.getAttribute("x")));
  picture.append(...nodes.map(([node]) => node));
  group(nodes);
  for (const [tick, text] of onAxis(Math.floor(width / 110))) {
    const anchor = at(tick) < 16 ? "start" : at(tick) > width - 24 ? "end" : "middle";
    picture.append(svg("text", { x: at(tick), y: height - 6, "text-anchor": anchor }, text));
  }
  $("strip").replaceChildren(picture);
}

function drawTotals() {
  const block = (kind) => svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, svg("rect", { class: `block ${phaseClass(kind)}`, x: 1, y: 2, width: 12, height: 10, rx: 2 }));
  const share = (value) => (data.wall ? `${((100 * value) / data.wall).toFixed(1)} %` : "");
  $("totals").replaceChildren(...data.totals.map(([kind, value]) => html("li", {}, block(kind), kind, html("b", {}, seconds(value)), share(value))));
}

function drawParts() {
  const total = data.parts.reduce((sum, [, value]) => sum + value, 0);
  $("goodput").textContent = data.is_pending ? "nothing is measured yet" : data.goodput === null ? "" : `goodput ${(100 * data.goodput).toFixed(1)} %`;
  $("parts").replaceChildren(...data.parts.map(([name, value]) => html("li", {}, name, html("b", {}, seconds(value)), `${((100 * value) / total).toFixed(1)} %`)));
  $("findings").replaceChildren(...data.findings.map(([kind, text]) => html("li", {}, html("b", {}, kind), `: ${text}`)));
  $("findings").hidden = !data.findings.length;
  $("by-rank").hidden = !data.ranks.length;
  const size = (value) => (value ? `${(value / 2 ** 20).toFixed(0)} MiB` : "");
  const most = Math.max(1e-12, ...data.ranks.map((row) => row[1]));
  const time = (title) => ({ title, number: true, text: seconds, bar: (value) => value / most });
  table($("ranks"), [{ title: "Rank", number: true }, time("A batch"), time("Of it, waiting for data"), time("Forward pass"), { title: "Memory", number: true, text: size }, { title: "GPU memory", number: true, text: size }], data.ranks);
}

// Tables.

const views = {}; // of tables: how each is sorted and filtered, by the name of its box

/** A table that can be sorted and filtered; it shows its first rows, and all on request. */
function table(box, columns, rows, { search = "", sorted = -1 } = {}) {
  const view = (views[box.id] ??= { column: sorted, descending: sorted >= 0, wanted: "", all: false });
  box.replaceChildren();
  if (!rows.length) { box.append(html("p", { class: "empty" }, "none")); return; }
  const body = html("tbody");
  const more = html("button", { class: "more", type: "button", onclick: () => { view.all = true; draw(); } });
  const heads = columns.map((column, index) => {
    const sort = () => { view.descending = view.column === index ? !view.descending : Boolean(column.number); view.column = index; draw(); };
    return html("th", { class: column.number && "number", scope: "col" }, html("button", { type: "button", onclick: sort }, column.title));
  });
  const texts = rows.map((row) => columns.map((column, index) => (column.text || String)(row[index], row)));
  function draw() {
    const order = rows.map((_, index) => index).filter((index) => texts[index].join(" ").toLowerCase().includes(view.wanted));
    if (view.column >= 0) {
      const key = columns[view.column].key || ((value) => value);
      const compare = (one, other) => (typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other)));
      order.sort((one, other) => compare(key(rows[one][view.column]), key(rows[other][view.column])) * (view.descending ? -1 : 1) || one - other);
    }
    heads.forEach((each, index) => each.setAttribute("aria-sort", index !== view.column ? "none" : view.descending ? "descending" : "ascending"));
    const shown = view.all ? order : order.slice(0, FIRST_ROWS);
    body.replaceChildren(...shown.map((index) => html("tr", {}, ...columns.map((column, at) => html("td", { class: column.number ? "number" : column.tight ? "tight" : null }, column.bar ? bar(column.bar(rows[index][at])) : null, texts[index][at])))));
    more.hidden = shown.length === order.length;
    more.textContent = `Show all ${whole(order.length)}`;
    if (view.count) view.count.textContent = view.wanted ? `${whole(order.length)} of ${whole(rows.length)}` : "";
  }
  view.draw = draw;
  if (search && !view.count) {
    const field = html("input", { type: "search", placeholder: "Filter", "aria-label": search, oninput: () => { view.wanted = field.value.trim().toLowerCase(); view.draw(); } });
    view.count = html("span", { class: "count", role: "status" });
    box.closest("section").querySelector(".bar").append(html("span", { class: "tools" }, view.count, field));
  }
  box.append(html("div", { class: "scroll" }, html("table", {}, html("thead", {}, html("tr", {}, ...heads)), body)), more);
  draw();
}

function bar(share) {
  const node = html("span", { class: "share" });
  node.style.width = `${Math.round(70 * share)}px`;
  return node;
}

function drawTables() {
  table($("attempts"), [{ title: "", number: true }, { title: "What", tight: true }, { title: "Started", tight: true }, { title: "After the previous one", tight: true }, { title: "Duration", number: true }, { title: "Ended" }, { title: "Position" }, { title: "Work lost" }],
    data.attempts.map((each) => [each.number, each.kind, each.began, each.gap, each.took, each.ended, each.came, each.lost]));
  const most = Math.max(1e-12, ...data.costs.map((row) => row[2]));
  const estimated = (value, row) => (row[6] ? "≈ " : "") + seconds(value);
  table($("costs"), [{ title: "Plugin" }, { title: "Event" }, { title: "Time", number: true, text: estimated, bar: (value) => value / most }, { title: "Share", number: true, text: (value) => `${(100 * value).toFixed(1)} %` }, { title: "Times", number: true, text: whole }, { title: "Longest", number: true, text: seconds }],
    data.costs.map(([plugin, event, spent, times, longest, estimate]) => [plugin, event, spent, data.timed ? spent / data.timed : 0, times, longest, estimate]), { search: "Filter by plugin or event", sorted: 2 });
  const remarks = [
    data.costs.some((row) => row[5]) && "≈ estimated: the events of every batch were timed in some batches only.",
    data.costs.length && data.untimed.length && `No times are recorded for attempt ${data.untimed.join(", ")}.`,
  ];
  $("costs").append(...remarks.filter(Boolean).map((text) => html("p", { class: "remark" }, text)));
  table($("requests"), [{ title: "Request", tight: true }, { title: "Times", number: true, text: whole }, { title: "By", tight: true }, { title: "First step", number: true, text: whole }, { title: "When" }, { title: "Why" }, { title: "Never served", number: true, text: (value) => (value ? whole(value) : "") }],
    data.requests, { search: "Filter by request, plugin or reason" });
  $("folder").textContent = data.folder;
  $("folder").hidden = !data.folder;
  table($("checkpoints"), [{ title: "Step", number: true, text: whole }, { title: "Epoch", number: true }, { title: "File" }, { title: "Now", tight: true }, { title: "At that time", tight: true, text: (value) => (value ? "the best so far" : "") }, { title: "Pruned at step", number: true, text: (value) => (value === null ? "" : whole(value)), key: (value) => value ?? Infinity }, { title: "Rule" }],
    data.checkpoints, { search: "Filter by file or rule" });
}

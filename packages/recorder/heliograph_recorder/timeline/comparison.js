// Several runs on one page: their curves together, a fork beside its parent, and the details of one of them.

/** The runs by their places: of which other one each is a fork, -1 for none of these. */
function parentsOf(found) {
  return found.map(({ row }) => found.findIndex((other) => row?.parent && other.row?.id === row.parent.id));
}

/** The colour of each run: a fork has that of the first of its family, in another tone. */
function colours(parents) {
  const sizes = new Map();
  return parents.map((_, run) => {
    let root = run;
    for (let up = 0; parents[root] >= 0 && up < parents.length; up += 1) root = parents[root];
    const tone = sizes.get(root) ?? 0;
    if (root !== run) sizes.set(root, tone + 1);
    return root === run ? `run-${run % 6}` : `run-${root % 6} tone-${tone % 4}`;
  });
}

/** The facts of one of the runs, with the curves of all: that of a fork begins on that of its parent. */
function together(found, detail) {
  const place = Math.max(0, found.findIndex((each) => each.id === detail));
  const shown = found[place].facts;
  if (found.length === 1) return { ...shown, runs: null };
  const names = found.map(({ facts }) => facts.run);
  const runs = found.map(({ id, name, facts }) => ({ id, name: new Set(names).size === names.length ? facts.run : name }));
  const parents = parentsOf(found);
  const classes = colours(parents);
  const byName = new Map();
  found.forEach(({ facts }, run) => facts.charts.forEach((chart) => {
    if (!byName.has(chart.name)) byName.set(chart.name, []);
    byName.get(chart.name).push(...chart.curves.map((curve) => ({ ...curve, kept: undefined, hue: classes[run], run, name: runs[run].name })));
  }));
  for (const curves of byName.values()) for (const curve of curves) joinParent(curve, curves, parents, found);
  const partings = found.flatMap(({ facts }, run) => (run === place ? [] : facts.marks.filter(([kind]) => kind === "fork").map(([kind, step, time, title, lines]) => [kind, step, time, `${runs[run].name}: ${title}`, lines])));
  const reach = Math.max(...found.flatMap(({ facts }) => [...facts.attempts.map((each) => each.step), ...facts.marks.map((mark) => mark[1])]));
  return {
    ...shown, runs, place, classes, reach, longest: Math.max(...found.map(({ facts }) => facts.end)),
    marks: [...shown.marks, ...partings], charts: [...byName].map(([name, curves]) => ({ name, curves })),
  };
}

/** Notes on which curve that of a fork begins, and at which step. */
function joinParent(curve, curves, parents, found) {
  const parent = curves.find((other) => other.run === parents[curve.run] && other.metric === curve.metric);
  if (parent) curve.parent = { curve: parent, step: found[curve.run].row.parent.step };
}

/** Lets its reader choose the run whose details are shown; all that is not of every run says of which it is. */
function drawChoice(choose) {
  const runs = data.runs ?? [];
  const former = document.activeElement?.closest?.("#which") ? document.activeElement.value : null;
  $("which").hidden = !runs.length;
  $("which").replaceChildren(html("legend", {}, "Details of"), ...runs.map(({ id, name }, run) => {
    const box = html("input", { type: "radio", name: "which", value: id, checked: run === data.place, onchange: () => choose(id) });
    return html("label", {}, box, html("span", {}, swatch(data.classes[run]), name));
  }));
  if (former !== null) [...$("which").querySelectorAll("input")].find((each) => each.value === former)?.focus();
  document.querySelectorAll(".of").forEach((each) => each.remove());
  const of = () => html("span", { class: "of" }, swatch(data.classes[data.place]), runs[data.place].name);
  if (!runs.length) return;
  document.querySelectorAll(".each h2").forEach((title) => title.append(of()));
  if ($("key").childElementCount) $("key").prepend(html("li", { class: "of" }, "marks of", ...of().childNodes));
}

/** Says of which run the shown one is a fork, with a button that adds that one. */
function drawParent(row, isShown, add) {
  const parent = row?.parent;
  if (!parent || parent.id === null) return;
  $("parent").textContent = `fork of ${parent.name} at step ${whole(parent.step)}`;
  if (!isShown) $("parent").append(html("button", { class: "more", type: "button", onclick: () => add(parent.id) }, "Show it beside this run"));
}

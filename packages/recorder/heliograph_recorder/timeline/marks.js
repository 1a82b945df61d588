// Checkpoints, decisions and changes of plugins, as marks on the curves.

const GLYPHS = {
  best: "M0,-6.5L1.9,-2.2L6.4,-1.9L3,1.2L4,5.8L0,3.4L-4,5.8L-3,1.2L-6.4,-1.9L-1.9,-2.2Z",
  last: "M0,-6.2L6.2,0L0,6.2L-6.2,0ZM0,-2.4L-2.4,0L0,2.4L2.4,0Z",
  kept: "M0,-4.5L4.5,0L0,4.5L-4.5,0Z",
  pruned: "M0,-3.5L3.5,0L0,3.5L-3.5,0Z",
  stop: "M-2,-5L2,-5L5,-2L5,2L2,5L-2,5L-5,2L-5,-2Z",
  fork: "M0,6L0,0.5L-4.5,-5M0,0.5L4.5,-5",
  return: "M-4.5,0L2.5,-4.5L2.5,4.5Z",
  decision: "M-4.5,-4.5L4.5,-4.5L0,4.5Z",
  plugin: "M-4,-4L4,-4L4,4L-4,4Z",
  verdict: "M0,-5.5L5,4L-5,4Z",
};
const NAMES = {
  best: "best checkpoint", last: "last checkpoint", kept: "checkpoint", pruned: "checkpoint, pruned", stop: "stop", fork: "fork of another run", return: "resumed or rolled back",
  decision: "other decision", plugin: "plugin changed or failed", verdict: "verdict",
};
const RANK = Object.keys(GLYPHS);
const glyph = (kind) => svg("path", { class: `glyph ${kind}`, d: GLYPHS[kind] });
const isCheckpoint = (kind) => ["best", "last", "kept", "pruned"].includes(kind);

const allMarks = () => [
  ...data.marks.map(([kind, step, time, title, lines]) => ({ kind, step, time, title, lines })),
  ...data.returns.map((each) => ({ ...each, kind: "return" })),
];

/** Merges marks that would overlap. */
function clusters(of, x) {
  const placed = of.map((mark) => ({ mark, at: x(mark[state.axis]) })).sort((one, other) => one.at - other.at);
  const found = [];
  for (const { mark, at } of placed) {
    const last = found[found.length - 1];
    if (last && at - last.at < NEAR) last.marks.push(mark);
    else found.push({ at, marks: [mark] });
  }
  for (const each of found) {
    const ranked = [...each.marks].sort((one, other) => RANK.indexOf(one.kind) - RANK.indexOf(other.kind));
    each.kind = ranked[0].kind;
    each.at = x(ranked[0][state.axis]);
    each.marks = ranked;
  }
  return found;
}

function about(cluster) {
  const shown = cluster.marks.slice(0, MAX_MARKS);
  const parts = shown.flatMap((mark) => [head(mark.title), ...mark.lines.map(line)]);
  const left = cluster.marks.length - shown.length;
  return left ? [...parts, head(`and ${whole(left)} more here`)] : parts;
}

function markNode(cluster, y) {
  const label = cluster.marks.slice(0, MAX_MARKS).map((mark) => `${mark.title}: ${mark.lines.join(", ")}`).join("; ");
  return svg(
    "g",
    { class: "mark", transform: `translate(${cluster.at.toFixed(2)},${y})`, role: "img", "aria-label": label, "data-kind": cluster.kind },
    svg("circle", { class: "hit", r: 8.5 }),
    glyph(cluster.kind),
  );
}

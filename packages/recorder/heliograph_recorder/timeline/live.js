// Follows runs: lists them, shows those that are chosen, and asks the server for what is new.

const PERIOD = 1000; // milliseconds
const MAX_CHOSEN = 6; // there are so many colours
const chosen = new Map(embedded.live.chosen.slice(0, MAX_CHOSEN).map((id) => [id, { version: -1, facts: null }]));
let rows = [];
let detail = null; // the run whose details are shown, of several

async function ask(address) {
  const answer = await fetch(address);
  if (answer.status === 204) return null;
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function drawList() {
  const age = ({ modified, status }) => `${status && `${status}, `}${seconds(Math.max(0, Date.now() / 1000 - modified))} ago`;
  const cell = (text, tight) => html("td", { class: tight && "tight" }, text);
  const body = [...rows].sort((one, other) => (other.running === true) - (one.running === true) || (one.running ? one.name.localeCompare(other.name) : other.modified - one.modified)).map((row) => {
    const facts = chosen.get(row.id)?.facts;
    const box = html("input", { type: "checkbox", checked: chosen.has(row.id), disabled: chosen.size >= MAX_CHOSEN && !chosen.has(row.id), "aria-label": row.name, onchange: () => choose(row.id, box.checked) });
    const run = data?.runs?.findIndex((each) => each.id === row.id) ?? -1;
    const about = facts?.error ? [facts.error] : facts ? [facts.ended, ...facts.facts.slice(0, 1).map(([, value]) => value), ...facts.latest.map(([name, value]) => `${name} ${value}`)] : [];
    if (row.parent) about.unshift(`fork of ${row.parent.name} at step ${whole(row.parent.step)}`);
    return html("tr", {}, html("td", { class: "tight" }, box, run >= 0 ? swatch(data.classes[run]) : ""), cell(row.name, true), cell(row.running ? "running" : row.running === null ? "on another machine" : age(row), true), cell(about.join(", ")));
  });
  $("list").replaceChildren(html("div", { class: "scroll runs" }, html("table", {}, html("tbody", {}, ...body))));
  if (!rows.length) $("list").replaceChildren(html("p", { class: "empty" }, "There is no recording yet."));
}

function choose(id, wanted) {
  if (wanted) chosen.set(id, { version: -1, facts: null });
  else chosen.delete(id);
  update();
}

function showDetails(id) {
  detail = id;
  update();
}

/** Asks the run whose facts are shown for something. */
async function request(verb) {
  const value = verb === "set-lr" ? Number($("rate").value) : undefined;
  const run = shownFirst();
  $("answer").textContent = `asking ${run.name} ...`;
  const body = JSON.stringify({ run: run.id, verb, value, reason: $("reason").value.trim() || null });
  try {
    const answer = await fetch("ask", { method: "POST", headers: { "X-Watch-Token": embedded.live.token }, body });
    $("answer").textContent = await answer.text();
  } catch {
    $("answer").textContent = "The server of this page does not answer.";
  }
}

const hasFacts = (id) => chosen.get(id)?.facts && !chosen.get(id).facts.error;
const shownFirst = () => rows.find((row) => row.id === (hasFacts(detail) ? detail : [...chosen.keys()].find(hasFacts)));
document.querySelectorAll(".ask").forEach((button) => button.addEventListener("click", () => request(button.dataset.verb)));

/** Asks for the list and for what is new of the chosen runs; draws if anything is. */
async function update() {
  const were = rows.length;
  rows = await ask("runs");
  if (!were && rows.length && !chosen.size) { // those that were made after the page was opened
    const newest = rows.reduce((one, other) => (other.modified > one.modified ? other : one));
    chosen.set(newest.id, { version: -1, facts: null });
  }
  let isNew = false;
  for (const [id, run] of chosen) {
    const found = await ask(`facts?run=${id}&known=${run.version}`);
    if (found && chosen.get(id) === run) { Object.assign(run, found); isNew = true; }
  }
  const shown = [...chosen.keys()].filter(hasFacts).map((id) => {
    const row = rows.find((each) => each.id === id);
    return { id, row, name: row?.name ?? "", facts: chosen.get(id).facts };
  });
  const key = [detail, ...shown.map(({ name }) => name)].join("\n");
  if (shown.length && (isNew || key !== state.shown)) {
    show(together(shown, detail));
    drawChoice(showDetails);
    drawParent(shownFirst(), chosen.has(shownFirst()?.parent?.id), (id) => choose(id, true));
  }
  state.shown = key;
  document.body.classList.toggle("nothing", !shown.length);
  $("remote").hidden = !embedded.live.token || !shownFirst()?.remote;
  $("remote-title").textContent = `Ask ${data?.run ?? "the run"}`;
  drawList();
}

async function follow() {
  try {
    await update();
    $("trouble").textContent = "";
  } catch (error) {
    $("trouble").textContent = error instanceof TypeError ? "The server of this page does not answer." : error.message;
  }
  setTimeout(follow, PERIOD);
}

follow();

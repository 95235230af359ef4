// The page of runs: one command for many runs, previewed before it is executed.

import { post } from "./forms.js";

const bar = document.getElementById("chosen");
const dialog = document.getElementById("act-many");
const chosen = new Set();
const DOES = { pause: "Pause", resume: "Resume", cancel: "Cancel" };
let sending = {}; // has the key of what is sent

function boxes() {
  return [...document.querySelectorAll("[data-pick]")];
}

function tell() {
  if (!bar) return;
  bar.hidden = !chosen.size;
  const text = chosen.size === 1 ? "1 run" : `${chosen.size} runs`;
  const label = bar.querySelector("[data-chosen]");
  if (label.textContent !== text) label.textContent = text;
  const compare = bar.querySelector("[data-compare]");
  const [b, a] = chosen;
  compare.hidden = chosen.size !== 2;
  if (!compare.hidden) compare.href = `${compare.dataset.compare}?${new URLSearchParams({ a, b })}`;
  const all = document.getElementById("pick-all");
  if (all) {
    all.checked = boxes().length > 0 && boxes().every((box) => box.checked);
    all.indeterminate = !all.checked && boxes().some((box) => box.checked);
  }
}

function take() {
  chosen.clear();
  for (const box of boxes()) if (box.checked) chosen.add(box.dataset.pick);
  tell();
}

if (bar) {
  document.addEventListener("change", (event) => {
    if (event.target.id === "pick-all") for (const box of boxes()) box.checked = event.target.checked;
    if (event.target.id === "pick-all" || event.target.matches("[data-pick]")) take();
  });
  document.addEventListener("killick:drawn", take);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "x" || event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (event.target.closest("input:not([type=checkbox]), textarea, select")) return;
    const box = document.querySelector("[data-row][aria-selected=true] [data-pick]");
    if (!box) return;
    box.checked = !box.checked;
    take();
  });
  bar.querySelector("[data-none]").addEventListener("click", () => {
    for (const box of boxes()) box.checked = false;
    take();
  });
  for (const button of bar.querySelectorAll("[data-command]")) {
    button.addEventListener("click", () => showPreview(button.dataset.command));
  }
  dialog.querySelector("[data-do]").addEventListener("click", carryOut);
  take();
}

async function ask(dryRun) {
  const because = dialog.querySelector("[name=because]").value.trim();
  const body = { command: dialog.dataset.command, runs: [...chosen], dry_run: dryRun };
  if (because && !dryRun) body.because = because;
  const { ok, doc } = await post(bar.dataset.act, JSON.stringify(body), dryRun ? undefined : sending);
  if (!ok) throw new Error(doc.detail);
  return doc;
}

function show(found) {
  const list = dialog.querySelector("[data-will]");
  list.replaceChildren(...found.results.map((each) => {
    const line = document.createElement("li");
    line.className = each.done ? "" : "not";
    const name = document.createElement("b");
    name.className = "mono";
    name.textContent = each.run;
    line.append(name, ": ", each.done ?? each.refused);
    return line;
  }));
}

function wrong(error) {
  const note = dialog.querySelector("[data-wrong]");
  note.hidden = !error;
  note.textContent = error ? error.message : "";
}

async function showPreview(command) {
  dialog.dataset.command = command;
  sending = {};
  const many = chosen.size === 1 ? "1 run" : `${chosen.size} runs`;
  dialog.querySelector("h2").textContent = `${DOES[command]} ${many}?`;
  const act = dialog.querySelector("[data-do]");
  act.textContent = `${DOES[command]} ${many}`;
  act.className = command === "cancel" ? "button danger" : "button primary";
  act.disabled = true;
  dialog.querySelector("[data-will]").replaceChildren();
  wrong(null);
  dialog.showModal();
  try {
    const found = await ask(true);
    show(found);
    act.disabled = !found.results.some((each) => each.done);
  } catch (error) {
    wrong(error);
  }
}

async function carryOut() {
  const act = dialog.querySelector("[data-do]");
  act.disabled = true;
  wrong(null);
  try {
    const found = await ask(false);
    show(found);
    document.dispatchEvent(new CustomEvent("killick:done"));
    if (found.results.every((each) => each.done)) {
      dialog.close();
      bar.querySelector("[data-none]").click();
    }
  } catch (error) {
    wrong(error);
    act.disabled = false;
  }
}

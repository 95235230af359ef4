// What can be done to a run. Every command says what it will do before it can be given: the sentence comes from the
// server, which changes nothing for it, and only then the button that does it can be pressed.

import { collect, post, refused, tell } from "./forms.js";

const PATIENCE_MS = 350;
const PREFILL_CHARS_MAX = 20_000;
const place = document.querySelector("#act[data-act]");
let timer = 0;
let wanted = null;

// The buttons and dialogs, where they are a part of another page.
async function load() {
  if (!place || document.querySelector("dialog[data-command][open]")) return;
  try {
    const answer = await fetch(place.dataset.act, { headers: { "Killick-Live": "1" } });
    if (!answer.ok) return;
    const inside = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("act-inside");
    if (!inside || document.querySelector("dialog[data-command][open]")) return;
    inside.removeAttribute("data-part");
    if (place.firstElementChild?.innerHTML === inside.innerHTML) return;
    const isOpen = place.querySelector("#act-more")?.open;
    place.replaceChildren(inside);
    if (isOpen) place.querySelector("#act-more").open = true;
    if (wanted) choose(wanted);
  } catch {
    // It is tried again when the run has changed.
  }
}

function open(command) {
  const dialog = document.getElementById(`do-${command}`);
  if (!dialog || dialog.open) return;
  document.getElementById("act-more")?.removeAttribute("open");
  dialog.showModal();
  (dialog.querySelector("[data-control]:not([type=hidden])") ?? dialog.querySelector("[data-close]")).focus();
  showPreview(dialog.querySelector("form"));
}

async function showPreview(form) {
  const button = form.querySelector("footer button:not([data-close])");
  const preview = form.querySelector("[data-will]");
  button.disabled = true;
  let json;
  try {
    json = collect(form);
  } catch (error) {
    preview.replaceChildren(error.message);
    return;
  }
  const asked = (form.dataset.asked = String(Number(form.dataset.asked ?? 0) + 1));
  const { ok, doc } = await post(form.dataset.post, json === "{}" ? '{"dry_run":true}' : `${json.slice(0, -1)},"dry_run":true}`);
  if (form.dataset.asked !== asked || form.dataset.sent !== undefined) return;
  if (!ok) {
    preview.replaceChildren();
    refused(form, doc);
    return;
  }
  tell(form, {});
  const sentence = document.createElement("p");
  sentence.textContent = doc.will;
  const list = document.createElement("ul");
  for (const line of doc.more ?? []) {
    const item = document.createElement("li");
    item.textContent = line;
    list.append(item);
  }
  preview.replaceChildren(sentence, list);
  button.disabled = false;
}

// A place in time was chosen, by the slider or at a step.
function choose({ place: at, action, atStep }) {
  wanted = { place: at, action: null };
  for (const select of document.querySelectorAll("dialog[data-command] [data-place]")) pick(select, at);
  const step = /^([\d.]+)/.exec(at)?.[1];
  for (const select of document.querySelectorAll("dialog[data-command] [data-place-step]")) if (step) pick(select, step);
  if (!action) return;
  open(action);
  // At a step, a fork is mostly about what that step came to.
  if (atStep && action === "fork") document.getElementById("fork-output")?.setAttribute("open", "");
}

// A step inside a scope, or one of long ago, is not among the choices until it is wanted.
function pick(select, value) {
  if (![...select.options].some((option) => option.value === value)) select.add(new Option(value, value));
  select.value = value;
}

// What is on record of a step, to be changed instead of typed: its output, and where it had options, each as a button.
async function prefill(pair) {
  const number = pair.querySelector("[data-name]").value;
  const area = pair.querySelector("[data-json]");
  if (!number || pair.dataset.of === number) return;
  pair.dataset.of = number;
  const answer = await fetch(pair.dataset.recorded.replace("STEP", encodeURIComponent(number)), { headers: { Accept: "application/json" } });
  if (!answer.ok || pair.dataset.of !== number) return;
  const doc = await answer.json();
  const text = doc.status === "done" ? JSON.stringify(doc.output, null, 2) : "";
  area.value = pair.dataset.was = text.length <= PREFILL_CHARS_MAX ? text : "";
  const options = doc.decision?.options ?? doc.waits.flatMap((wait) => wait.options ?? []);
  pair.querySelector("[data-options]").replaceChildren(...options.map((option) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "button";
    button.textContent = typeof option === "string" ? option : JSON.stringify(option);
    button.dataset.fill = JSON.stringify(option);
    return button;
  }));
  area.dispatchEvent(new Event("input", { bubbles: true }));
}

document.addEventListener("toggle", (event) => {
  const pair = event.target.open && event.target.querySelector?.("[data-recorded]");
  if (pair) prefill(pair);
}, true);

document.addEventListener("change", (event) => {
  const pair = event.target.matches?.("[data-name]") && event.target.closest("[data-recorded]");
  if (pair) prefill(pair);
});

document.addEventListener("click", (event) => {
  const option = event.target.closest?.("[data-fill]");
  if (option) {
    const area = option.closest("[data-pair]").querySelector("[data-json]");
    area.value = option.dataset.fill;
    area.dispatchEvent(new Event("input", { bubbles: true }));
  }
  const button = event.target.closest?.("[data-do]");
  if (button) open(button.dataset.do);
  else if (event.target.closest?.("[data-close]")) event.target.closest("dialog").close();
});

document.addEventListener("input", (event) => {
  const form = event.target.closest?.("form[data-dry-run]");
  if (!form) return;
  form.querySelector("footer button:not([data-close])").disabled = true;
  form.dataset.asked = String(Number(form.dataset.asked ?? 0) + 1); // what is on its way is about what was there before
  clearTimeout(timer);
  timer = setTimeout(() => showPreview(form), PATIENCE_MS);
});

document.addEventListener("killick:sent", (event) => {
  const dialog = event.target.closest("dialog[data-command]");
  if (!dialog) return;
  clearTimeout(timer);
  dialog.querySelector("[data-will]").replaceChildren();
  dialog.querySelector("footer button:not([data-close])").hidden = true;
  dialog.querySelector("[data-close]").textContent = "Close";
  dialog.querySelector("[data-close]").focus();
  dialog.addEventListener("close", load, { once: true });
});

document.addEventListener("killick:place", (event) => choose(event.detail));
document.addEventListener("killick:drawn", () => load());
load();

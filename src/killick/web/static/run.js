// The page of one run: tabs, steps that open in place, values shown whole, copying, verifying.
//
// A step that is open keeps its very nodes when the page is drawn again, and is fetched anew when it has changed.

import { post } from "./forms.js";

const opened = new Map(); // step → { seen, body }

// fetching ------------------------------------------------------------------------------------------

async function fragment(address) {
  const answer = await fetch(address, { headers: { Accept: "text/html" } });
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const found = page.querySelector("[data-fragment]") ?? page.querySelector("#main");
  if (!found) throw new Error(`${answer.status}`);
  return document.adoptNode(found);
}

function shown(element) {
  dress(element);
  element.dispatchEvent(new CustomEvent("killick:shown", { bubbles: true }));
}

async function put(place, address) {
  place.setAttribute("aria-busy", "true");
  try {
    const found = await fragment(address);
    place.replaceChildren(found);
    shown(place);
  } catch (error) {
    const problem = document.createElement("p");
    problem.className = "bad";
    problem.textContent = `It could not be read: ${error.message}`;
    place.replaceChildren(problem);
  } finally {
    place.removeAttribute("aria-busy");
  }
}

// steps ---------------------------------------------------------------------------------------------

function body(step) {
  return step.querySelector(":scope > [data-detail]");
}

function load(step) {
  const { seen } = step.dataset;
  opened.set(step.dataset.step, { seen, body: body(step) });
  return put(body(step), step.dataset.load);
}

function restore() {
  for (const step of document.querySelectorAll("details.step[open]")) {
    const known = opened.get(step.dataset.step);
    if (!known) {
      load(step);
    } else {
      if (body(step) !== known.body) body(step).replaceWith(known.body);
      if (known.seen !== step.dataset.seen) load(step);
    }
  }
}

async function show(number) {
  const step = document.getElementById(`step-${number}`);
  if (!step) {
    const wanted = new URL(location.pathname, location.origin);
    wanted.searchParams.set("step", number);
    wanted.hash = `step-${number}`;
    location.assign(wanted);
    return;
  }
  choose("timeline");
  for (const other of document.querySelectorAll(".step.shown")) other.classList.remove("shown");
  step.classList.add("shown");
  step.open = true;
  step.scrollIntoView({ block: "center" });
  step.querySelector("summary").focus({ preventScroll: true });
}

// tabs ----------------------------------------------------------------------------------------------

function choose(name, { push = true } = {}) {
  const panel = document.getElementById(name);
  if (!panel?.hasAttribute("data-panel")) return;
  for (const each of document.querySelectorAll("[data-panel]")) each.hidden = each !== panel;
  mark(name);
  if (panel.dataset.load && !panel.dataset.loaded) {
    panel.dataset.loaded = "yes";
    put(panel, panel.dataset.load);
  }
  const address = new URL(location.href);
  if (name === "timeline") address.searchParams.delete("tab");
  else address.searchParams.set("tab", name);
  if (push && address.href !== location.href) history.pushState(null, "", address);
  dispatchEvent(new Event("resize")); // what was hidden can be measured now
}

function mark(name) {
  for (const tab of document.querySelectorAll("[data-tab]")) {
    if (tab.dataset.tab === name) tab.setAttribute("aria-current", "true");
    else tab.removeAttribute("aria-current");
  }
}

function current() {
  return document.querySelector("[data-panel]:not([hidden])")?.id ?? "timeline";
}

// values --------------------------------------------------------------------------------------------

function dress(under = document) {
  for (const pre of under.querySelectorAll("pre[data-copy]:not([data-dressed])")) {
    pre.dataset.dressed = "";
    const around = document.createElement("div");
    around.className = "copied";
    pre.replaceWith(around);
    const button = document.createElement("button");
    button.type = "button";
    button.className = "button copy";
    button.textContent = "Copy";
    around.append(pre, button);
  }
}

async function all(link) {
  const pre = link.closest(".value").querySelector("pre");
  link.setAttribute("aria-busy", "true");
  const answer = await fetch(link.href);
  if (answer.ok) {
    pre.textContent = await answer.text();
    link.closest(".all").remove();
  }
}

async function copy(button) {
  const pre = button.parentElement.querySelector("pre");
  try {
    await navigator.clipboard.writeText(pre.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(pre);
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// verifying -----------------------------------------------------------------------------------------

async function verify(button) {
  const status = document.querySelector("[data-verified]");
  status.hidden = false;
  status.textContent = "Reading the whole record…";
  button.disabled = true;
  const { ok, doc: found } = await post(button.dataset.verify, undefined, {});
  button.disabled = false;
  const wrong = (found.problems ?? []).filter((each) => !each.healed);
  status.className = `verified ${found.holds ? "good" : "bad"}`;
  status.textContent = !ok
    ? found.detail
    : found.holds
      ? `✓ All ${found.events.toLocaleString()} events hold${found.seals ? `, held against ${found.seals} seals` : "; nothing was sealed yet"}${found.erased ? `; ${found.erased} erased on purpose` : ""}.`
      : `✗ ${wrong.map((each) => `${each.seq ? `@${each.seq}: ` : ""}${each.what}`).join("; ")}`;
}

// events --------------------------------------------------------------------------------------------

const send = (name, detail) => document.dispatchEvent(new CustomEvent(name, { detail }));

document.addEventListener("click", (event) => {
  const on = (selector) => event.target.closest(selector);
  const isPlain = !(event.ctrlKey || event.metaKey || event.shiftKey || event.button);
  let found;
  if (isPlain && (found = on("[data-tab]")) && document.getElementById(found.dataset.tab)) {
    event.preventDefault();
    choose(found.dataset.tab);
  } else if (isPlain && (found = on("[data-show-step]")) && document.querySelector("[data-panel]")) {
    event.preventDefault();
    show(found.dataset.showStep);
  } else if (isPlain && (found = on("[data-page]")) && found.closest("[data-panel]")) {
    event.preventDefault();
    put(found.closest("[data-panel]"), found.href);
  } else if (isPlain && (found = on("[data-all]"))) {
    event.preventDefault();
    all(found);
  } else if ((found = on(".copy"))) {
    copy(found);
  } else if ((found = on("[data-verify]"))) {
    verify(found);
  } else if ((found = on("[data-goto]"))) {
    choose("state");
    send("killick:goto", { place: found.dataset.goto });
    document.getElementById("state")?.scrollIntoView({ block: "start" });
  } else if ((found = on("[data-place]"))) {
    send("killick:place", { place: found.dataset.place, action: found.dataset.action, atStep: true });
  }
});

document.addEventListener(
  "toggle",
  (event) => {
    const step = event.target;
    if (!step.matches?.("details.step")) return;
    if (!step.open) opened.delete(step.dataset.step);
    else if (opened.get(step.dataset.step)?.body !== body(step)) load(step);
    const hash = step.open ? `#${step.id}` : location.hash === `#${step.id}` ? "" : location.hash;
    if (step.id && hash !== location.hash) history.replaceState(null, "", location.pathname + location.search + hash);
  },
  true,
);

document.addEventListener("keydown", (event) => {
  if (event.key !== "o" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select") || document.querySelector("dialog[open]")) return;
  const step = document.querySelector('.step[aria-selected="true"]');
  if (step) step.open = !step.open;
});

document.querySelector("[data-jump]")?.addEventListener("submit", (event) => {
  const number = new FormData(event.target).get("step").trim();
  if (number && document.getElementById(`step-${number}`)) {
    event.preventDefault();
    show(number);
  } else if (number) {
    event.target.action += `#step-${number}`;
  } else {
    event.preventDefault();
  }
});

document.addEventListener("killick:show-step", (event) => show(event.detail.step));
document.addEventListener("killick:drawn", (event) => {
  dress(event.target);
  if (event.target.dataset.part === "run-steps") {
    restore();
    if (document.getElementById("follow-newest")?.checked) event.target.querySelector(".steps > :last-child")?.scrollIntoView({ block: "nearest" });
  }
  if (event.target.dataset.part === "run-tabs") mark(current());
  for (const panel of document.querySelectorAll("[data-panel][data-loaded]")) {
    // What is not looked at is read again when it is.
    if (panel.hidden) delete panel.dataset.loaded;
  }
});
addEventListener("popstate", () => choose(new URLSearchParams(location.search).get("tab") ?? "timeline", { push: false }));
addEventListener("hashchange", fromHash);

function fromHash() {
  const [, number] = location.hash.match(/^#step-([0-9.]+)$/) ?? [];
  const isThere = number && document.getElementById(`step-${number}`);
  if (isThere || (number && new URLSearchParams(location.search).get("step") !== number)) show(number);
}

function tellSince() {
  const SPANS = [[86400, "d"], [3600, "h"], [60, "m"]];
  for (const each of document.querySelectorAll("time[data-since]")) {
    const seconds = Math.max(Math.floor((Date.now() - Number(each.dataset.since) / 1000) / 1000), 0);
    const [size, unit] = SPANS.find(([least]) => seconds >= least) ?? [1, " s"];
    const rest = size > 60 ? Math.floor((seconds % size) / (size === 86400 ? 3600 : 60)) : 0;
    each.textContent = `${Math.floor(seconds / size)}${unit}${rest ? ` ${rest}${size === 86400 ? "h" : "m"}` : ""}`;
  }
}

dress();
restore();
if (document.querySelector("[data-panel]")) choose(current(), { push: false });
fromHash();
tellSince();
setInterval(tellSince, 1000);

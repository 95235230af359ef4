// The command palette: Ctrl-K or ⌘K on every page. Goes to a page, an agent's runs, or a run by its id.

const dialog = document.getElementById("palette");
const input = dialog?.querySelector("input");
const list = dialog?.querySelector("[role=listbox]");
const base = document.documentElement.dataset.base;
const RUNS_MAX = 8;
const WAIT_MS = 120;
let known = [];
let timer = 0;
let turn = 0;

function pages() {
  const links = [...document.querySelectorAll("header.bar nav a, [data-command-page]")];
  return links.map((link) => ({ kind: "page", name: link.dataset.commandPage ?? link.firstChild.textContent.trim(), href: link.href }));
}

function show(found) {
  list.replaceChildren(...found.map(({ kind, name, href, status }, n) => {
    const item = document.createElement("li");
    item.id = `palette-${n}`;
    item.setAttribute("role", "option");
    item.dataset.href = href;
    const text = document.createElement("span");
    text.className = kind === "run" ? "mono" : "";
    text.textContent = name;
    const label = document.createElement("span");
    label.className = "quiet";
    label.textContent = status ?? kind;
    item.append(text, label);
    return item;
  }));
  select(0);
  dialog.querySelector("[data-found]").textContent = found.length ? "" : "Nothing has this in its name.";
}

function select(at) {
  const items = [...list.children];
  const next = items[(at + items.length) % items.length];
  for (const item of items) item.setAttribute("aria-selected", String(item === next));
  if (next) input.setAttribute("aria-activedescendant", next.id);
  else input.removeAttribute("aria-activedescendant");
  next?.scrollIntoView({ block: "nearest" });
}

async function look() {
  const text = input.value.trim();
  const mine = (turn += 1);
  const has = ({ name }) => name.toLowerCase().includes(text.toLowerCase());
  show(known.filter(has));
  const answer = await fetch(`${base}/api/v1/runs?${new URLSearchParams({ limit: RUNS_MAX, ...(text && { q: text }) })}`);
  if (!answer.ok || mine !== turn) return;
  const doc = await answer.json();
  const agents = doc.agents.map((name) => ({ kind: "agent", name, href: `${base}/runs?${new URLSearchParams({ agent: name })}` }));
  const runs = doc.runs.map(({ id, status }) => ({ kind: "run", name: id, status, href: `${base}/runs/${encodeURIComponent(id)}` }));
  const exact = runs.filter(({ name }) => name === text);
  show([...exact, ...known.filter(has), ...agents.filter(has), ...runs.filter(({ name }) => name !== text)]);
}

function open() {
  known = pages();
  input.value = "";
  dialog.showModal();
  look();
}

if (dialog) {
  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.altKey || event.shiftKey) return;
    event.preventDefault();
    if (dialog.open) dialog.close();
    else if (!document.querySelector("dialog[open]")) open();
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-palette]")) open();
    else if (event.target === dialog) dialog.close();
  });
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(look, WAIT_MS);
  });
  input.addEventListener("keydown", (event) => {
    const at = [...list.children].findIndex((item) => item.getAttribute("aria-selected") === "true");
    if (event.key === "ArrowDown" || event.key === "ArrowUp") select(at + (event.key === "ArrowDown" ? 1 : -1));
    else if (event.key === "Enter") list.children[at]?.click();
    else return;
    event.preventDefault();
  });
  list.addEventListener("click", (event) => {
    const item = event.target.closest("[data-href]");
    if (item) location.assign(item.dataset.href);
  });
}

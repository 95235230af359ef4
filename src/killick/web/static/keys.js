// Keys for every page: go somewhere, move through rows, search, help. Typing in a field is never a command.

const GO = { r: "/runs", o: "/overview", i: "/inbox", f: "/find", t: "/triggers", w: "/workers", h: "/health" };
const base = document.documentElement.dataset.base;
let going = 0;

function isTyping(target) {
  return target.closest("input:not([type=range], [type=checkbox], [type=radio]), textarea, select, [contenteditable]");
}

function rows() {
  return [...document.querySelectorAll("[data-row]")].filter((row) => row.offsetParent !== null);
}

function move(by) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.getAttribute("aria-selected") === "true" || row.querySelector("[data-choose][aria-current]"));
  const next = all[Math.min(Math.max(at + by, 0), all.length - 1)];
  for (const row of all) if (row.localName !== "li") row.setAttribute("aria-selected", row === next ? "true" : "false");
  next.scrollIntoView({ block: "nearest" });
  next.querySelector("a, summary, button")?.focus({ preventScroll: true });
  next.dispatchEvent(new CustomEvent("killick:moved", { bubbles: true }));
}

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
  if (document.querySelector("dialog[open]")) return;
  if (going && Date.now() - going < 1200 && GO[event.key]) {
    location.assign(base + GO[event.key]);
    event.preventDefault();
  } else if (event.key === "g") {
    going = Date.now();
    return;
  } else if (event.key === "/") {
    const search = document.querySelector("[data-search]");
    if (!search) return;
    search.focus();
    search.select();
    event.preventDefault();
  } else if (event.key === "?") {
    document.getElementById("keys")?.showModal();
  } else if (event.key === "j" || event.key === "k") {
    move(event.key === "j" ? 1 : -1);
  }
  going = 0;
});

// Filters act at once, and what is not asked for is not in the address.
for (const each of document.querySelectorAll("select[data-go]")) {
  each.addEventListener("change", () => each.form.requestSubmit());
}
document.addEventListener("submit", (event) => {
  if (!event.target.matches("form.toolbar[method=get]")) return;
  for (const each of event.target.elements) if (each.name && !each.value) each.disabled = true;
});
addEventListener("pageshow", () => {
  for (const each of document.querySelectorAll("form.toolbar[method=get] :disabled")) each.disabled = false;
});

// A menu closes by Escape, which gives the focus back, and by a click anywhere else.
document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
});
document.addEventListener("keydown", (event) => {
  const menu = event.key === "Escape" && document.querySelector("details.menu[open]");
  if (!menu) return;
  if (menu.contains(document.activeElement)) menu.querySelector("summary").focus();
  menu.open = false;
});

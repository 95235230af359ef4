// Keeps a page as it is on record: parts marked data-part are replaced when what they show has changed.
//
// <body data-live-runs='["a", "b"]' data-live-counts> names the runs of the page. Elements that the user
// has open, focused or typed into stay. Relative times are updated as they pass.

const base = document.documentElement.dataset.base;
const PATIENCE_MS = 600;
const RETRY_MS = 2000;
let source = null;
let timer = 0;
let questions = 0;
let isAsking = false;
let isAgain = false;

const SPANS = [[86400, "d"], [3600, "h"], [60, "m"]];

function coarse(us) {
  const seconds = Math.floor(Math.abs(us) / 1e6);
  if (seconds < 1) return "";
  for (const [size, unit] of SPANS) if (seconds >= size) return `${Math.floor(seconds / size)}${unit}`;
  return `${seconds} s`;
}

function formatTimes(under = document) {
  const now = Date.now() * 1000;
  for (const each of under.querySelectorAll("time[data-ago]")) {
    const at = Number(each.dataset.ago);
    const distance = coarse(now - at);
    const text = distance ? (at <= now ? `${distance} ago` : `in ${distance}`) : "now";
    if (each.textContent !== text) each.textContent = text;
  }
  for (const each of under.querySelectorAll("time[data-moment]:not([data-formatted])")) {
    const at = new Date(Number(each.dataset.moment) / 1000);
    each.title = `${at.toISOString().replace("T", " ").replace("Z", "")} UTC`;
    each.textContent = inZone(at, FORMS[each.dataset.form] ?? { ...DAY, ...CLOCK });
    each.dataset.formatted = "";
  }
  for (const each of under.querySelectorAll("[data-prose]:not([data-formatted])")) {
    each.dataset.prose ||= each.textContent;
    each.textContent = each.dataset.prose.replace(UTC_TIMES, (_, day, time) => {
      const at = new Date(`${day}T${time}Z`);
      const isToday = inZone(at, DAY) === inZone(new Date(), DAY);
      return inZone(at, isToday ? CLOCK : { ...DAY, ...CLOCK });
    });
    each.dataset.formatted = "";
  }
}

// The zone ------------------------------------------------------------------------------------------

// Every time of a page is in one zone, which the bar names; a click goes to UTC and back.
const LOCAL = Intl.DateTimeFormat().resolvedOptions().timeZone;
const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
const DAY = { year: "numeric", month: "short", day: "numeric" };
const FORMS = {
  clock: CLOCK, exact: { ...DAY, ...CLOCK, fractionalSecondDigits: 3 }, hour: { hour: "2-digit", minute: "2-digit", hourCycle: "h23" },
  day: { month: "short", day: "numeric" },
};
const UTC_TIMES = /(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d) UTC/g;
let zone = localStorage.getItem("killick-zone") === "UTC" ? "UTC" : LOCAL;

function inZone(at, options) {
  return at.toLocaleString(undefined, { ...options, timeZone: zone });
}

function nameZone() {
  for (const each of document.querySelectorAll("[data-zone-switch]")) {
    each.textContent = zone.replaceAll("_", " ");
    each.ariaLabel = `Time zone: ${each.textContent}`;
    each.title = zone === LOCAL ? "Times are local; click for UTC" : `Times are in UTC; click for ${LOCAL}`;
  }
}

document.addEventListener("click", (event) => {
  if (!event.target.closest("[data-zone-switch]")) return;
  zone = zone === "UTC" ? LOCAL : "UTC";
  localStorage.setItem("killick-zone", zone === "UTC" ? "UTC" : "");
  nameZone();
  for (const each of document.querySelectorAll("time[data-formatted], [data-prose]")) delete each.dataset.formatted;
  formatTimes();
});

// Focus ---------------------------------------------------------------------------------------------

// Where the focus is, so that it can be found again among new elements: by id, else by its place and its words.
function placeOf(part, element) {
  const around = element.closest("[id]");
  const near = around && part.contains(around) ? around : part;
  const alike = [...near.querySelectorAll(element.localName)].filter((each) => isLike(each, element));
  return { element, id: element.id, near: near.id, nth: alike.indexOf(element) };
}

function isLike(one, other) {
  return one.getAttribute("href") === other.getAttribute("href") && one.getAttribute("class") === other.getAttribute("class");
}

function refocus(found, { element, id, near, nth }) {
  const around = (near && document.getElementById(near)) || found;
  const alike = [...around.querySelectorAll(element.localName)].filter((each) => isLike(each, element));
  const next = element.isConnected ? element : id ? document.getElementById(id) : alike[Math.min(nth, alike.length - 1)];
  next?.focus({ preventScroll: true });
}

// What was typed for a question is no answer to the one that took its place.
function isAskedStill(element, same) {
  return element.closest("[data-wait]")?.dataset.seen === same.closest("[data-wait]")?.dataset.seen;
}

function keep(old, fresh) {
  for (const typed of old.querySelectorAll("[data-wait] input[data-control][id]")) {
    const same = fresh.querySelector(`[id="${CSS.escape(typed.id)}"]`);
    if (same && isAskedStill(typed, same)) same.value = typed.value;
  }
  for (const open of old.querySelectorAll("details[id][open]")) {
    const same = fresh.querySelector(`details[id="${CSS.escape(open.id)}"]`);
    if (!same || !isAskedStill(open, same)) continue;
    if (open.dataset.fetched !== undefined || open.querySelector("[data-fetched]")) same.replaceWith(open.cloneNode(true));
    else same.open = true;
  }
  for (const row of old.querySelectorAll("[aria-selected=true][id]")) {
    fresh.querySelector(`[id="${CSS.escape(row.id)}"]`)?.setAttribute("aria-selected", "true");
  }
  for (const box of old.querySelectorAll("input[type=checkbox][id]:checked")) {
    const same = fresh.querySelector(`[id="${CSS.escape(box.id)}"]`);
    if (same) same.checked = true;
  }
}

function signature(element) {
  const copy = element.cloneNode(true);
  for (const time of copy.querySelectorAll("time, [data-prose]")) time.replaceWith("");
  return copy.innerHTML;
}

const drawn = new WeakMap();

// Notifications -----------------------------------------------------------------------------------

const NOTIFY = "killick-notify";
const openQuestions = (page) => Number.parseInt(page.querySelector('[data-part="nav-inbox"]')?.textContent ?? "", 10) || 0;

function notifies() {
  return localStorage.getItem(NOTIFY) === "yes" && "Notification" in window && Notification.permission === "granted";
}

// A new question is announced by the system while the page is hidden. Pages in several tabs show one notification.
function announce(before, now) {
  if (now <= before || !document.hidden || !notifies()) return;
  const text = now === 1 ? "1 question is open" : `${now} questions are open`;
  const shown = new Notification("Killick asks", { body: text, tag: "killick-inbox" });
  shown.addEventListener("click", () => {
    window.focus();
    location.assign(`${base}/inbox`);
  });
}

const notifier = document.querySelector("[data-notify]");
function showNotifier() {
  notifier.setAttribute("aria-pressed", String(notifies()));
  notifier.textContent = notifies() ? "Notifications on" : "Notify me";
}
if (notifier && "Notification" in window) {
  notifier.hidden = false;
  showNotifier();
  notifier.addEventListener("click", async () => {
    const wanted = !notifies();
    if (wanted && Notification.permission !== "granted") await Notification.requestPermission();
    localStorage.setItem(NOTIFY, wanted ? "yes" : "no");
    showNotifier();
    if (wanted && !notifies()) notifier.textContent = "The browser refused";
  });
}

function swap(fresh) {
  for (const part of document.querySelectorAll("[data-part]")) {
    if (part.contains(document.activeElement) && document.activeElement.matches("input, textarea, select")) continue;
    const found = fresh.querySelector(`[data-part="${CSS.escape(part.dataset.part)}"]`);
    if (!found) continue;
    const now = signature(found);
    if (drawn.get(part) === now) continue;
    const focused = part.contains(document.activeElement) ? placeOf(part, document.activeElement) : null;
    const before = new Map([...part.querySelectorAll("[data-row][id]")].map((row) => [row.id, row.dataset.seen]));
    keep(part, found);
    for (const row of found.querySelectorAll("[data-row][id]")) {
      if (before.get(row.id) !== row.dataset.seen) row.classList.add("changed");
    }
    part.replaceWith(found);
    drawn.set(found, now);
    formatTimes(found);
    found.dispatchEvent(new CustomEvent("killick:drawn", { bubbles: true }));
    if (focused) refocus(found, focused);
  }
  document.title = fresh.title;
  announce(questions, (questions = openQuestions(document)));
  const watched = fresh.body.dataset.liveRuns;
  if (watched !== undefined && watched !== document.body.dataset.liveRuns) {
    document.body.dataset.liveRuns = watched;
    follow();
  }
}

async function refresh() {
  if (isAsking) {
    isAgain = true;
    return;
  }
  isAsking = true;
  try {
    const answer = await fetch(location.href, { headers: { "Killick-Live": "1" } });
    if (answer.ok) swap(new DOMParser().parseFromString(await answer.text(), "text/html"));
    else if (answer.status === 429 || answer.status >= 500) setTimeout(soon, RETRY_MS); // no other hint may come
  } catch {
    // The stream will say when the server is back.
  } finally {
    isAsking = false;
    if (isAgain) {
      isAgain = false;
      soon();
    }
  }
}

// What changes all the time is drawn anew again and again, and not put off for ever.
function soon() {
  timer ||= setTimeout(() => {
    timer = 0;
    refresh();
  }, PATIENCE_MS);
}

function say(text) {
  const state = document.querySelector("[data-live-state]");
  if (state && state.textContent !== text) state.textContent = text;
}

function follow() {
  source?.close();
  source = null;
  const { liveRuns, liveCounts } = document.body.dataset;
  if (liveRuns === undefined && liveCounts === undefined) return;
  const asked = new URLSearchParams();
  for (const run of JSON.parse(liveRuns || "[]")) asked.append("run", run);
  if (liveCounts !== undefined) asked.append("counts", "true");
  source = new EventSource(`${base}/api/v1/live?${asked}`);
  source.addEventListener("open", () => say("live"));
  source.addEventListener("error", () => say("not live; trying again"));
  source.addEventListener("changed", soon);
}

document.addEventListener("killick:done", soon);
document.addEventListener("killick:shown", (event) => formatTimes(event.target));
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    if (notifies()) return;
    source?.close();
    source = null;
  } else if (!source) {
    follow();
    soon();
  }
});
for (const part of document.querySelectorAll("[data-part]")) drawn.set(part, signature(part));
questions = openQuestions(document);
nameZone();
formatTimes();
let passed = 0;
setInterval(() => {
  formatTimes();
  // What no stream tells of is read again now and then, and at once while it is not complete.
  const every = Number(document.body.dataset.liveSeconds ?? 0);
  if (every && !document.hidden && ((passed += 1) % every === 0 || document.querySelector("[data-unfinished]"))) refresh();
}, 1000);
follow();

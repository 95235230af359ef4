// Collects forms that were made from schemas, and sends them as JSON.
//
// <form data-post="/api/v1/…" data-fixed='{"verb": "edit"}'> has fields marked data-field and data-kind. Untouched
// values are sent as they were, byte for byte; empty optional ones are left out. Values are put together as JSON
// text, so that no number loses a digit.

const csrf = () => document.querySelector('meta[name="killick-csrf"]')?.content ?? "";
const TOAST_MS = 8000;
const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/;

class Misfit extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

// Reading fields ----------------------------------------------------------------------------------

function fieldsOf(element) {
  const found = [];
  for (const child of element.children) {
    if (child.tagName === "TEMPLATE") continue;
    if (child.dataset.field !== undefined) found.push(child);
    else found.push(...fieldsOf(child));
  }
  return found;
}

function initialOf(control) {
  if (control.tagName !== "SELECT") return control.defaultValue;
  const chosen = [...control.options].find((option) => option.defaultSelected) ?? control.options[0];
  return chosen?.value ?? "";
}

function isTouched(field) {
  const controls = field.matches("[data-control]") ? [field] : [...field.querySelectorAll("[data-control]")];
  return controls.some((control) => control.value !== initialOf(control)) || field.dataset.moved !== undefined;
}

function labelOf(field) {
  return field.querySelector(":scope > legend, .name")?.firstChild?.textContent.trim() || field.dataset.field || "value";
}

function read(field) {
  const { kind, was } = field.dataset;
  const required = field.dataset.required !== undefined;
  if (kind === "object") return readObject(field, required, was);
  if (kind === "list") return readList(field, required, was);
  return readOne(field, field.querySelector("[data-control]"), required, was);
}

function readObject(field, required, was) {
  if (!required && was === undefined && !isTouched(field)) return { has: false, changed: false };
  const parts = [];
  const onlyChanged = field.dataset.changedOnly !== undefined;
  let changed = false;
  for (const child of fieldsOf(field)) {
    if (onlyChanged && !isTouched(child)) continue;
    const found = read(child);
    changed ||= found.changed;
    if (found.has && (found.changed || !onlyChanged)) parts.push(`${JSON.stringify(child.dataset.field)}:${found.json}`);
  }
  return { has: !onlyChanged || parts.length > 0, json: `{${parts.join(",")}}`, changed };
}

function readList(field, required, was) {
  const rows = [...field.querySelector(":scope > [data-rows]").children];
  const json = `[${rows.map((row) => read(fieldsOf(row)[0]).json ?? "null").join(",")}]`;
  return { has: required || was !== undefined || rows.length > 0, json, changed: json !== (was ?? "[]") };
}

function readOne(field, control, required, was) {
  const { kind } = field.dataset;
  const text = kind === "text" || kind === "long" ? control.value : control.value.trim();
  const touched = control.value !== initialOf(control);
  if (!touched && was !== undefined) return { has: true, json: was, changed: false };
  if (text === "") {
    if (was === undefined) {
      if (required) throw new Misfit(field, `${labelOf(field)} is missing`);
      return { has: false, changed: false };
    }
    if (field.dataset.nullable !== undefined) return { has: true, json: "null", changed: true };
    if (kind === "text" || kind === "long") return { has: true, json: '""', changed: true };
    throw new Misfit(field, `${labelOf(field)} cannot be empty`);
  }
  return { has: true, json: written(field, control, kind, text), changed: touched || was === undefined };
}

function written(field, control, kind, text) {
  if (kind === "integer") {
    if (!/^[+-]?\d+$/.test(text)) throw new Misfit(field, `${labelOf(field)} takes a whole number`);
    return String(BigInt(text.replace(/^\+/, "")));
  }
  if (kind === "number") {
    if (!Number.isFinite(Number(text))) throw new Misfit(field, `${labelOf(field)} takes a number`);
    return NUMBER.test(text) ? text : String(Number(text));
  }
  if (kind === "json") {
    try {
      JSON.parse(text);
    } catch (error) {
      throw new Misfit(field, `${labelOf(field)} is no JSON: ${error.message}. Put a text in "quotes"`);
    }
    return text;
  }
  if (kind === "choice" || kind === "boolean") return text;
  return JSON.stringify(text);
}

// The body of a form, as JSON text; with `other`, the same answer to another form's question. Throws a Misfit that
// names the field.
export function collect(form, submitter, other = form) {
  const fixed = { ...JSON.parse(other.dataset.fixed ?? "{}"), ...JSON.parse(submitter?.dataset.fixed ?? "{}") };
  const parts = new Map(Object.entries(fixed).map(([name, value]) => [name, JSON.stringify(value)]));
  if (submitter?.dataset.value !== undefined) parts.set("value", submitter.dataset.value); // as it was written
  for (const field of fieldsOf(form)) {
    if (field.dataset.field === "value" && submitter && (submitter.dataset.bare !== undefined || parts.has("value"))) continue;
    const onlyChanged = field.closest("[data-if-changed]");
    if (onlyChanged && !isTouched(field)) continue; // it may not even fit what is asked for today
    const found = read(field);
    if (found.has && (found.changed || !onlyChanged)) parts.set(field.dataset.field, found.json);
  }
  // Who changed a field approves what they wrote, not what was there before.
  if (submitter?.dataset.approve !== undefined && parts.has("value")) parts.set("verb", '"edit"');
  for (const pair of form.querySelectorAll("[data-pair]")) {
    const name = pair.querySelector("[data-name]").value.trim();
    const value = pair.querySelector("[data-json]").value.trim();
    if (!value || value === pair.dataset.was?.trim()) continue; // as it is on record
    if (!name) throw new Misfit(pair, "say what the value is of");
    const entry = `${JSON.stringify(name)}:${written(pair, pair, "json", value)}`;
    const before = (parts.get(pair.dataset.pair) ?? "{}").slice(1, -1);
    parts.set(pair.dataset.pair, `{${before}${before ? "," : ""}${entry}}`);
  }
  return `{${[...parts].map(([name, json]) => `${JSON.stringify(name)}:${json}`).join(",")}}`;
}

// Sending -----------------------------------------------------------------------------------------

const keys = new WeakMap();

// A unique key. Not by randomUUID, which pages without TLS do not have.
function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function keyOf(form) {
  if (!keys.has(form)) keys.set(form, newKey());
  return keys.get(form);
}

// Sends JSON text; gives {ok, status, doc}. With a form, its key makes the write count once.
export async function post(address, json, form) {
  const headers = { "Content-Type": "application/json", "X-Killick-CSRF": csrf() };
  if (form) headers["Idempotency-Key"] = keyOf(form);
  let answer;
  try {
    answer = await fetch(address, { method: "POST", headers, body: json });
  } catch {
    return { ok: false, status: 0, doc: { detail: "The server cannot be reached. Nothing is known of what became of it; send it again: it counts once." } };
  }
  // A key identifies one request and its answer; without an answer the request is repeated.
  if (form && answer.status < 500) keys.delete(form);
  const doc = await answer.json().catch(() => ({ detail: `The server answered ${answer.status}.` }));
  return { ok: answer.ok, status: answer.status, doc };
}

export function tell(form, { alert = "", done = "" }) {
  for (const [name, text] of [["[data-alert]", alert], ["[data-done]", done]]) {
    const place = form.querySelector(name);
    if (!place) continue;
    place.textContent = text;
    place.hidden = !text;
  }
}

function clearMarks(form) {
  for (const each of form.querySelectorAll("[aria-invalid]")) each.removeAttribute("aria-invalid");
  for (const each of form.querySelectorAll("[data-misfit]")) each.remove();
}

function mark(field, message) {
  const control = field.querySelector("[data-control], [data-json]");
  if (!control) return;
  for (let at = field.closest("details"); at; at = at.parentElement.closest("details")) at.open = true;
  control.setAttribute("aria-invalid", "true");
  const hint = document.createElement("p");
  hint.className = "help bad";
  hint.dataset.misfit = "";
  hint.textContent = message;
  field.append(hint);
  control.focus();
}

// The field that a message of the server's names, if it names one.
function named(form, detail) {
  const fields = [...form.querySelectorAll("[data-field]")].filter((field) => field.dataset.field.length > 1);
  fields.sort((one, other) => other.dataset.field.length - one.dataset.field.length);
  return fields.find((field) => {
    const name = field.dataset.field.replace(/[^\w]/g, "\\$&");
    return new RegExp(`(^|[\\s'"\`])${name}(=|: |\\.|\\[|['"\`]| is missing| takes )|\\.${name}\\b`).test(detail);
  });
}

export function refused(form, doc) {
  const detail = doc.detail ?? "It was refused.";
  tell(form, { alert: detail });
  const field = named(form, detail);
  if (field && field.dataset.kind !== "object") mark(field, detail);
}

function collected(form, submitter) {
  clearMarks(form);
  try {
    return collect(form, submitter);
  } catch (misfit) {
    if (!(misfit instanceof Misfit)) throw misfit;
    tell(form, { alert: misfit.message });
    mark(misfit.field, misfit.message);
    return null;
  }
}

async function submit(form, submitter) {
  const json = collected(form, submitter);
  if (json === null) return;
  const others = form.querySelector("[data-also]:not([hidden]) input:checked") ? alike(form) : [];
  const question = others.length ? `Give this answer to ${others.length + 1} questions?` : submitter?.dataset.confirm;
  if (question && !(await confirmed(question, nameOf(submitter), others.length ? [form, ...others].map(asked) : []))) return;
  const buttons = [...form.querySelectorAll("button:not([disabled])")];
  for (const button of buttons) button.disabled = true;
  form.setAttribute("aria-busy", "true");
  const shown = document.querySelectorAll("[data-wait]").length; // counted first: answered questions leave the page
  const { ok, doc } = await post(form.dataset.post, json, form);
  const failed = [];
  let answered = 1;
  for (const other of ok ? others : []) {
    const { ok: taken, doc: why } = await post(other.dataset.post, collect(form, submitter, other), other);
    if (taken) answered += 1;
    else failed.push(`${other.closest("[data-wait]").dataset.wait}: ${why.detail ?? "refused"}`);
  }
  form.removeAttribute("aria-busy");
  for (const button of buttons) button.disabled = false;
  if (!ok) {
    refused(form, doc);
    return;
  }
  const said = others.length
    ? [`${answered} of ${others.length + 1} questions answered`, ...failed].join(". ")
    : [doc.did, doc.next].filter(Boolean).join(". ") || "Done.";
  tell(form, { done: said });
  form.dataset.sent = "";
  if (form.closest("[data-wait]")) {
    // The question is about to leave the page, so the result is shown in a toast.
    document.activeElement?.blur();
    const left = shown - answered;
    toast(`${said}${said.endsWith(".") ? "" : "."} ${left > 0 ? `${left} left on this page.` : "Nothing is left."}`);
  }
  form.dispatchEvent(new CustomEvent("killick:sent", { bubbles: true, detail: doc }));
  document.dispatchEvent(new CustomEvent("killick:done", { detail: doc }));
  const goes = form.dataset.made !== undefined ? doc.made : doc.run;
  if (form.dataset.goes && goes) location.assign(form.dataset.goes.replace("RUN", encodeURIComponent(goes)));
}

function toast(text) {
  document.querySelector(".toast")?.remove();
  const toast = document.createElement("p");
  toast.className = "toast note good";
  toast.setAttribute("role", "status");
  document.body.append(toast);
  toast.textContent = text;
  setTimeout(() => toast.remove(), TOAST_MS);
}

// Asks for confirmation, in words. True: continue.
function confirmed(question, does, lines = []) {
  const dialog = document.createElement("dialog");
  const form = document.createElement("form");
  form.method = "dialog";
  const body = document.createElement("div");
  body.className = "body";
  body.textContent = question;
  if (lines.length) {
    const list = body.appendChild(document.createElement("ul"));
    list.className = "asked";
    for (const line of lines) list.appendChild(document.createElement("li")).textContent = line;
  }
  const foot = document.createElement("footer");
  for (const [value, text, kind] of [["", "Leave it", "button"], ["yes", does.trim(), "button danger"]]) {
    const button = document.createElement("button");
    button.value = value;
    button.className = kind;
    button.textContent = text;
    foot.append(button);
  }
  form.append(body, foot);
  dialog.append(form);
  dialog.setAttribute("aria-label", question);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "yes");
      dialog.remove();
    });
  });
}

// Before and after --------------------------------------------------------------------------------

// What differs from what was shown: name, what it was, what it is. A value that does not fit is reported when it is sent.
function changesOf(form) {
  const root = form.querySelector('[data-field="value"]');
  if (!root) return [];
  const changes = [];
  const fields = root.dataset.kind === "object" ? fieldsOf(root) : [root];
  for (const field of fields) {
    if (!isTouched(field)) continue;
    let is = field.querySelector("[data-control]")?.value ?? "";
    try {
      const found = read(field);
      if (found.has && found.changed) is = found.json;
    } catch (misfit) {
      if (!(misfit instanceof Misfit)) throw misfit;
    }
    changes.push([field.dataset.field, field.dataset.was ?? "nothing", is]);
  }
  return changes;
}

// The text of a button, without its key.
function nameOf(button) {
  return [...button.childNodes].filter((each) => each.nodeName !== "KBD").map((each) => each.textContent).join("").trim();
}

// Questions alike ------------------------------------------------------------------------------------

// The forms of the other questions on the page that ask the same: of the same agent and rule, about the same tool or
// step, with the same options.
function alike(form) {
  const row = form.closest("[data-wait]");
  const same = [...document.querySelectorAll("[data-wait]")].filter((each) => each !== row && each.dataset.same === row.dataset.same);
  return same.map((each) => each.querySelector("form.verbs")).filter((each) => each && each.dataset.sent === undefined);
}

// A question in one line: its id, and its arguments or its words.
function asked(form) {
  const row = form.closest("[data-wait]");
  const terms = [...row.querySelectorAll(".call .arguments dt")];
  const call = terms.map((term) => `${term.textContent.trim()} ${term.nextElementSibling.textContent.trim()}`).join(", ");
  return `${row.dataset.wait}: ${call || row.querySelector(".prompt")?.textContent.trim() || ""}`;
}

// An edit is for the one call that it was written for; any other answer may be given to all that ask the same.
function offerAll(form) {
  const label = form.querySelector("[data-also]");
  if (!label) return;
  const count = alike(form).length;
  const edits = form.querySelector("[data-approve]") && changesOf(form).length > 0;
  label.hidden = !count || Boolean(edits);
  label.querySelector("span").textContent = count === 1 ? "and to the other one that asks the same" : `and to the ${count} others that ask the same`;
}

const LABEL_CHARS_MAX = 60;

// The button that approves says what it approves; while another answer is being written it approves nothing.
function relabel(row) {
  const form = row?.querySelector("form[data-preview]");
  if (form) offerAll(form);
  const button = form?.querySelector("[data-approve]");
  if (!button) return;
  const summary = changesOf(form).map(([name, , is]) => (name === "value" ? is : `${name} ${is}`)).join(", ");
  const cut = summary.length > LABEL_CHARS_MAX ? `${summary.slice(0, LABEL_CHARS_MAX)}…` : summary;
  button.querySelector("[data-label]").textContent = summary ? `Approve with ${cut}` : "Approve";
  button.disabled = [...row.querySelectorAll("form[data-instead]")].some((other) => fieldsOf(other).some(isTouched));
}

function preview(form) {
  const place = form.querySelector("[data-changes]");
  if (!place) return;
  const list = document.createElement("dl");
  list.className = "kv";
  for (const [name, was, is] of changesOf(form)) {
    const term = document.createElement("dt");
    term.textContent = name;
    const value = document.createElement("dd");
    const before = document.createElement("del");
    before.textContent = was;
    const after = document.createElement("ins");
    after.textContent = is;
    value.append(before, " → ", after);
    list.append(term, value);
  }
  place.replaceChildren(...(list.children.length ? [list] : []));
}

// Listening ---------------------------------------------------------------------------------------

document.addEventListener("submit", (event) => {
  const form = event.target.closest("form[data-post]");
  if (!form) return;
  event.preventDefault();
  if (!form.hasAttribute("aria-busy")) submit(form, event.submitter);
});

document.addEventListener("input", (event) => {
  const form = event.target.closest?.("form[data-post]");
  if (!form) return;
  tell(form, {});
  clearMarks(form);
  // Typed text stays when the page is drawn again.
  event.target.closest("details[id]")?.setAttribute("data-fetched", "");
  if (form.dataset.preview !== undefined) preview(form);
  relabel(form.closest("[data-wait]"));
});

document.addEventListener("killick:drawn", (event) => {
  for (const form of event.target.querySelectorAll("[data-wait] form[data-preview]")) {
    preview(form);
    relabel(form.closest("[data-wait]"));
  }
});

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-add], [data-remove]");
  if (!button) return;
  const list = button.closest('[data-kind="list"]');
  list.dataset.moved = "";
  if (button.dataset.add !== undefined) {
    const row = list.querySelector(":scope > template").content.firstElementChild.cloneNode(true);
    list.querySelector(":scope > [data-rows]").append(row);
    row.querySelector("[data-control]")?.focus();
  } else {
    button.closest("li").remove();
    list.querySelector(":scope > [data-add]").focus();
  }
  list.dispatchEvent(new Event("input", { bubbles: true }));
});

// a, r and e go to the answers of the question that is shown; Enter gives them. One stray key answers nothing.
document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest?.("input, textarea, select")) return;
  const row = document.activeElement?.closest("[data-wait]") ?? document.querySelector("[data-wait]:not([hidden])");
  const found = row?.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (!found) return;
  event.preventDefault();
  if (found.tagName === "DETAILS") {
    found.open = true;
    found.querySelector("[data-control]")?.focus();
  } else {
    found.focus();
  }
});

for (const row of document.querySelectorAll("[data-wait]")) relabel(row);

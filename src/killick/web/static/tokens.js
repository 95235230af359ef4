// The page of tokens: makes one, shows it once, revokes one. Keeps nothing.

const csrf = document.querySelector('meta[name="killick-csrf"]').content;

async function ask(method, address, body) {
  const headers = { "X-Killick-CSRF": csrf };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(address, { method, headers, body: body && JSON.stringify(body) });
  const doc = answer.status === 204 ? null : await answer.json();
  if (!answer.ok) throw new Error(doc.detail);
  return doc;
}

async function refresh() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  // From the first token on, every user needs one: its creator signs in with it.
  if (answer.redirected) {
    made.querySelector("[data-first]").hidden = false;
    document.querySelector('[data-part="tokens"]').hidden = true;
    return;
  }
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.querySelector('[data-part="tokens"]');
  if (fresh) document.querySelector('[data-part="tokens"]').replaceWith(fresh);
}

const form = document.querySelector("#token-new");
const wrong = form.querySelector("[data-wrong]");
const made = form.querySelector("[data-made]");
const text = form.querySelector("[data-token]");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  wrong.hidden = made.hidden = true;
  const { name, scope, expires } = Object.fromEntries(new FormData(form));
  try {
    const doc = await ask("POST", form.action, { name, scope, expires: expires || null });
    text.textContent = doc.token;
    made.hidden = false;
    text.focus();
    form.querySelector("#name").value = "";
    await refresh();
  } catch (error) {
    wrong.textContent = error.message;
    wrong.hidden = false;
  }
});

form.querySelector("[data-copy-token]").addEventListener("click", async (event) => {
  await navigator.clipboard.writeText(text.textContent);
  event.target.textContent = "Copied";
});

const dialog = document.querySelector("#revoking");
let revoking = null;

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-revoke]");
  if (!button) return;
  revoking = button.dataset.revoke;
  dialog.querySelector("[data-name]").textContent = button.dataset.who;
  dialog.returnValue = "";
  dialog.showModal();
});

dialog.addEventListener("close", async () => {
  if (dialog.returnValue !== "yes") return;
  try {
    await ask("DELETE", revoking);
    await refresh();
  } catch (error) {
    wrong.textContent = error.message;
    wrong.hidden = false;
  }
});

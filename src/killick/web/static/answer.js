// The page of an answer link. The token is in the fragment of the address, which no browser sends: it is exchanged for the
// question by POST, and leaves the address. The tab keeps it, so that it can be loaded again.

const KEY = "killick-link";
const place = document.querySelector("[data-linked]");
const token = location.hash.slice(1) || sessionStorage.getItem(KEY) || "";
sessionStorage.setItem(KEY, token);
history.replaceState(null, "", location.pathname);

function say(text) {
  place.textContent = text;
}

async function show() {
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(place.dataset.linked, { method: "POST", headers, body: JSON.stringify({ link: token }) });
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  document.title = page.title;
  document.getElementById("main").replaceChildren(...page.getElementById("main").children);
  for (const form of document.querySelectorAll("form[data-post]")) {
    form.dataset.fixed = JSON.stringify({ ...JSON.parse(form.dataset.fixed ?? "{}"), link: token });
  }
  for (const name of ["drawn", "shown"]) document.dispatchEvent(new CustomEvent(`killick:${name}`));
}

async function tryToShow() {
  if (!token) return say("This address has no link in it. Open the link of the message again, as a whole.");
  say("Reading your link …");
  await show().catch(() => say("The server cannot be reached. Load the page again."));
}

// What was answered, and by whom, takes the place of the question.
document.addEventListener("killick:sent", tryToShow);
// Another link that is opened in this tab changes the fragment only.
addEventListener("hashchange", () => location.reload());
await tryToShow();

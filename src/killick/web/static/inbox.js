// The inbox: a list of questions, and the one that is chosen. The address says which; nothing is fetched to choose one.

const NARROW = matchMedia("(max-width: 720px)");
const inbox = () => document.querySelector(".inbox.lists");
const links = () => [...document.querySelectorAll("[data-choose]")];

function choose(id) {
  const link = links().find((each) => each.dataset.choose === id);
  if (!link) return;
  for (const each of links()) each === link ? each.setAttribute("aria-current", "true") : each.removeAttribute("aria-current");
  for (const each of document.querySelectorAll("[data-wait]")) each.hidden = each.dataset.wait !== id;
  inbox().dataset.named = "";
  if (link.href !== location.href) history.replaceState(null, "", link.href);
}

// On a phone the list and a question are pages of their own, so that Back leads from one to the other.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("[data-choose]");
  if (!link || NARROW.matches || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  choose(link.dataset.choose);
});

// j and k choose as they move.
document.addEventListener("killick:moved", (event) => {
  const link = event.target.querySelector("[data-choose]");
  if (link && !NARROW.matches) choose(link.dataset.choose);
});

// After an answer the next question is shown, or the one before where it was the last.
document.addEventListener("killick:sent", (event) => {
  const answered = event.target.closest("[data-wait]")?.dataset.wait;
  const all = links();
  const at = all.findIndex((each) => each.dataset.choose === answered);
  if (at < 0) return;
  const next = all[at + 1] ?? all[at - 1];
  if (next && !NARROW.matches) choose(next.dataset.choose);
  else history.replaceState(null, "", document.querySelector(".back").href);
});

// A question that comes in later does not take the place of the one that is being read.
if (!NARROW.matches) choose(links().find((each) => each.ariaCurrent)?.dataset.choose);

// An update that was asked for before a question was chosen is drawn after it: the address says which one it is.
document.addEventListener("killick:drawn", () => {
  if (!NARROW.matches) choose(new URLSearchParams(location.search).get("wait"));
});

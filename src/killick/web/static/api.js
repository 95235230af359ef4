// Sends a read of the API as the signed-in person, and shows its response. Writes are not sent from here.

const CHARS_MAX = 20_000;

function addressOf(form) {
  let path = form.dataset.try;
  const query = new URLSearchParams();
  for (const input of form.querySelectorAll("input")) {
    const value = input.value.trim();
    if (input.dataset.in === "path") path = path.replace(`{${input.name}}`, encodeURIComponent(value));
    else if (input.placeholder) for (const each of value.split(",").filter(Boolean)) query.append(input.name, each.trim());
    else if (value) query.append(input.name, value);
  }
  return query.size ? `${path}?${query}` : path;
}

function written(text) {
  try {
    const pretty = JSON.stringify(JSON.parse(text), null, 2);
    return pretty.length > CHARS_MAX ? `${pretty.slice(0, CHARS_MAX)}\n… ${pretty.length - CHARS_MAX} more characters` : pretty;
  } catch {
    return text.slice(0, CHARS_MAX);
  }
}

document.addEventListener("submit", async (event) => {
  const form = event.target.closest("form[data-try]");
  if (!form) return;
  event.preventDefault();
  const [sent, answer] = ["[data-sent]", "[data-answer]"].map((each) => form.parentElement.querySelector(each));
  const address = addressOf(form);
  try {
    const response = await fetch(address);
    sent.textContent = `GET ${address}: ${response.status} ${response.statusText}`;
    answer.textContent = written(await response.text());
  } catch {
    sent.textContent = `GET ${address}: no response`;
    answer.textContent = "";
  }
  answer.hidden = !answer.textContent;
});

// Names to ask by, fetched when the form is first used: the browser suggests them as they are typed.

const form = document.querySelector("form[data-names]");

form?.addEventListener("focusin", async () => {
  const answer = await fetch(form.dataset.names);
  if (!answer.ok) return;
  const names = await answer.json();
  for (const kind of ["tools", "errors", "arguments"]) {
    const options = names[kind].map((name) => new Option("", kind === "arguments" ? `${name}=` : name));
    document.getElementById(kind).replaceChildren(...options);
  }
}, { once: true });

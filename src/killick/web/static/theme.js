// Light or dark, as the person chose, before anything is drawn. Without a choice the system's own is taken.

{
  const root = document.documentElement;
  const chosen = localStorage.getItem("killick-theme");
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;

  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-theme-switch]")) return;
    const system = matchMedia("(prefers-color-scheme: dark)").matches;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : system;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("killick-theme", root.dataset.theme);
  });
}

// A browser keeps our cookie to itself when somebody comes by a link from another site. From this page it shows it:
// whoever is signed in goes on to where they wanted to go.

const next = document.querySelector('input[name="next"]').value;
const answer = await fetch(next, { headers: { Accept: "text/html" }, redirect: "manual" });
if (answer.ok) location.replace(next);

// A browser does not send the cookie when the user follows a link from another site. From this page it does:
// a signed-in user continues to the requested page.

const next = document.querySelector('input[name="next"]').value;
const answer = await fetch(next, { headers: { Accept: "text/html" }, redirect: "manual" });
if (answer.ok) location.replace(next);

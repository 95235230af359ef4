// The slider through a run's time: each boundary's state, and what its step changed.
//
// Answers are kept, asked for when the slider rests, one at a time, and a late one never replaces a newer one nor moves
// the slider. Says where it stands by "killick:place" and goes where "killick:goto" says.

const REST_MS = 60;
const KEPT_MAX = 400;

class Time {
  constructor(panel) {
    this.panel = panel;
    this.slider = panel.querySelector("input[type=range]");
    this.shown = panel.querySelector("[data-time-moment]");
    this.kept = new Map();
    this.wanted = 0;
    this.isAsking = false;
    this.queued = null;
    this.answered = 0;
    this.timer = 0;
    this.count = 0;
    this.place = null;
    this.pinned = null;
    panel.querySelector("[data-time-pin]").addEventListener("click", () => this.pin());
    this.slider.addEventListener("input", () => this.rest());
    this.slider.addEventListener("keydown", (event) => this.key(event));
    for (const button of panel.querySelectorAll("[data-time-to]")) {
      button.addEventListener("click", () => this.step(button.dataset.timeTo));
    }
    for (const button of panel.querySelectorAll("[data-time-act]")) {
      button.addEventListener("click", () => this.tell(button.dataset.timeAct));
    }
    document.addEventListener("killick:goto", (event) => this.open({ place: event.detail.place }, true));
    document.addEventListener("killick:drawn", () => this.grown());
    addEventListener("hashchange", () => this.fromAddress());
    if (!this.fromAddress()) this.whenSeen(() => this.place ?? this.open({ place: "now" }));
  }

  whenSeen(then) {
    const watch = new IntersectionObserver((seen) => {
      if (!seen.some((each) => each.isIntersecting)) return;
      watch.disconnect();
      then();
    });
    watch.observe(this.panel);
  }

  fromAddress() {
    const at = new URLSearchParams(location.hash.slice(1)).get("at");
    if (at && at !== this.place) {
      const tab = this.panel.closest("[data-panel][hidden]")?.id;
      if (tab) document.querySelector(`[data-tab="${tab}"]`)?.click();
      this.open({ place: at }, true);
    }
    return Boolean(at);
  }

  get n() {
    return Number(this.slider.value);
  }

  // asking ------------------------------------------------------------------------------------

  rest() {
    clearTimeout(this.timer);
    this.queued = null;
    this.wanted += 1;
    const kept = this.kept.get(this.n);
    if (kept) {
      this.show(kept, this.wanted);
      return;
    }
    this.panel.querySelector("[data-time-caption]").textContent = `boundary ${this.n + 1} of ${this.count}`;
    this.timer = setTimeout(() => this.open({ n: this.n }), REST_MS);
  }

  async open({ n, place }, isNear = false) {
    const turn = (this.wanted += 1);
    if (this.isAsking) {
      this.queued = [{ n, place }, isNear];
      return;
    }
    this.isAsking = true;
    const asked = new URLSearchParams();
    if (place !== undefined) asked.set("place", place);
    if (n !== undefined) asked.set("n", n);
    this.shown.setAttribute("aria-busy", "true");
    const slow = setTimeout(() => this.shown.setAttribute("data-late", ""), 150);
    try {
      const answer = await fetch(`${this.panel.dataset.moments}?${asked}`);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const moment = page.querySelector(".moment");
      if (!answer.ok || !moment) throw new Error(page.querySelector(".note, main p")?.textContent.trim() || `no answer (${answer.status})`);
      this.keep(moment);
      this.show(moment, turn);
      if (isNear) this.panel.scrollIntoView({ block: "nearest" });
    } catch (error) {
      if (turn > this.answered) this.fail(error.message);
    } finally {
      clearTimeout(slow);
      this.shown.removeAttribute("data-late");
      this.shown.setAttribute("aria-busy", "false");
      this.isAsking = false;
      const next = this.queued;
      this.queued = null;
      if (next) this.open(...next);
    }
  }

  keep(moment) {
    if (this.kept.size >= KEPT_MAX) this.kept.delete(this.kept.keys().next().value);
    // Now moves on while a run does; any other boundary stands.
    if (Number(moment.dataset.n) < Number(moment.dataset.count) - 1) this.kept.set(Number(moment.dataset.n), moment);
  }

  // showing -----------------------------------------------------------------------------------

  show(moment, turn) {
    if (turn <= this.answered) return;
    this.answered = turn;
    const { n, count, at: place, caption } = moment.dataset;
    this.count = Number(count);
    this.slider.max = this.count - 1;
    this.slider.disabled = false;
    if (turn === this.wanted) this.slider.value = n;
    this.place = place;
    this.panel.querySelector("[data-time-place]").textContent = place;
    this.panel.querySelector("[data-time-caption]").textContent = caption;
    this.slider.setAttribute("aria-valuetext", `${place}: ${caption}`);
    const open = new Map([...this.shown.querySelectorAll("details[id]")].map((each) => [each.id, each.open]));
    const fresh = document.importNode(moment, true);
    for (const each of fresh.querySelectorAll("details[id]")) if (open.has(each.id)) each.open = open.get(each.id);
    this.shown.replaceChildren(fresh);
    this.shown.dispatchEvent(new CustomEvent("killick:shown", { bubbles: true }));
    const isNow = Number(n) === this.count - 1;
    for (const button of this.panel.querySelectorAll("[data-time-act]")) button.disabled = isNow && button.dataset.timeAct === "rewind";
    this.tellCompare();
    if (this.wasShown || !isNow) history.replaceState(null, "", isNow ? location.pathname + location.search : `#at=${place}`);
    this.wasShown = true;
    this.tell(null);
  }

  // A pinned moment: the slider moves on, and the two can be compared.
  pin() {
    this.pinned = this.pinned === null ? this.place : null;
    this.tellCompare();
    if (this.pinned) this.slider.focus();
  }

  tellCompare() {
    const { pinned, place } = this;
    const button = this.panel.querySelector("[data-time-pin]");
    button.setAttribute("aria-pressed", String(pinned !== null));
    button.textContent = pinned ? `Let go of ${pinned}` : "Compare with…";
    const link = this.panel.querySelector("[data-time-compare]");
    link.textContent = pinned ? `Compare ${pinned} with ${place}` : "Compare with now";
    link.href = `${this.panel.dataset.compare}&${new URLSearchParams(pinned ? { at: pinned, to: place } : { at: place })}`;
    link.hidden = place === (pinned ?? "now");
  }

  fail(message) {
    const problem = document.createElement("p");
    problem.className = "note bad";
    problem.textContent = message;
    this.shown.replaceChildren(problem);
  }

  tell(action) {
    document.dispatchEvent(new CustomEvent("killick:place", { detail: { place: this.place, n: this.n, action } }));
  }

  // moving ------------------------------------------------------------------------------------

  key(event) {
    const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10, PageDown: -10 }[event.key];
    if (by === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.go(this.n + by);
  }

  step(to) {
    this.go(this.n + (to === "after" ? 1 : -1));
  }

  go(n) {
    const next = Math.min(Math.max(n, 0), this.count - 1);
    if (next === this.n && this.place) return;
    this.slider.value = next;
    this.rest();
  }

  grown() {
    // The run went on. Who looks at now goes along; who looks at another moment stays there.
    if (!this.count) return;
    const isNow = this.n === this.count - 1;
    this.kept.clear();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(isNow ? { place: "now" } : { n: this.n }), REST_MS);
  }
}

for (const panel of document.querySelectorAll("[data-time]")) new Time(panel);

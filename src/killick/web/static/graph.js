// The drawing of a run: fetched when the page is there, drawn anew when the run went on. Its steps are links; folded
// ones open in place, and it can be larger or smaller.

const SETTLED_MS = 250;
const ZOOM = { least: 0.3, most: 3 };

class Drawing {
  constructor(panel) {
    this.panel = panel;
    this.body = panel.querySelector("[data-graph-drawn]");
    this.turn = 0;
    this.timer = 0;
    this.zoom = 1;
    this.isWhole = false;
    this.body.addEventListener("click", (event) => this.chosen(event));
    this.body.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.scale(this.zoom * (event.deltaY < 0 ? 1.1 : 1 / 1.1));
    }, { passive: false });
    panel.addEventListener("click", (event) => {
      const by = event.target.closest("[data-zoom]")?.dataset.zoom;
      const picture = this.body.querySelector("svg");
      if (by && picture) this.scale(by === "fit" ? Math.min((this.body.clientWidth - 18) / picture.viewBox.baseVal.width, 1) : this.zoom * Number(by));
      if (event.target.closest("[data-fold]")) this.unfold(false);
    });
    this.isSeen = false;
    this.isStale = true;
    new IntersectionObserver((seen) => {
      this.isSeen = seen.at(-1).isIntersecting;
      this.soon(0);
    }).observe(panel);
    document.addEventListener("killick:drawn", () => {
      this.isStale = true;
      this.soon(SETTLED_MS);
    });
  }

  soon(ms) {
    // A hidden graph is drawn when it is shown.
    clearTimeout(this.timer);
    if (this.isSeen && this.isStale) this.timer = setTimeout(() => this.draw(!this.turn), ms);
  }

  async draw(isFirst) {
    const turn = (this.turn += 1);
    this.isStale = false;
    try {
      const answer = await fetch(this.panel.dataset.picture + (this.isWhole ? "?whole=true" : ""));
      const text = await answer.text();
      if (turn !== this.turn) return;
      if (!answer.ok) throw new Error(JSON.parse(text).detail);
      const picture = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
      if (picture.localName !== "svg") throw new Error("the drawing cannot be read");
      this.show(document.importNode(picture, true), isFirst);
    } catch (error) {
      if (turn === this.turn) this.panel.querySelector("[data-graph-status]").textContent = error.message;
    } finally {
      this.body.setAttribute("aria-busy", "false");
    }
  }

  show(picture, isFirst) {
    const { scrollLeft, scrollTop } = this.body;
    const focused = document.activeElement?.closest?.("[data-graph-drawn] a")?.getAttribute("href");
    this.body.replaceChildren(picture);
    this.scale(this.zoom);
    if (focused) this.body.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    const here = picture.querySelector(".here");
    if (!isFirst || !here) this.body.scrollTo(scrollLeft, scrollTop);
    else {
      // Where the run is comes into sight; the page itself does not move.
      const at = here.getBoundingClientRect();
      const box = this.body.getBoundingClientRect();
      this.body.scrollTo(Math.max(at.left - box.left - box.width / 3, 0), Math.max(at.top - box.top - box.height / 2, 0));
    }
  }

  scale(by) {
    const picture = this.body.querySelector("svg");
    this.zoom = Math.min(Math.max(by, ZOOM.least), ZOOM.most);
    picture.setAttribute("width", Math.round(picture.viewBox.baseVal.width * this.zoom));
    picture.setAttribute("height", Math.round(picture.viewBox.baseVal.height * this.zoom));
  }

  async unfold(isWhole, step) {
    this.isWhole = isWhole;
    this.panel.querySelector("[data-fold]").hidden = !isWhole;
    await this.draw(false);
    const first = step && this.body.querySelector(`a[data-step="${CSS.escape(step)}"]`);
    first?.focus();
    // The longest runs are not drawn whole; their steps are in the timeline.
    if (first?.textContent.trim().startsWith("…")) document.dispatchEvent(new CustomEvent("killick:show-step", { detail: { step } }));
  }

  chosen(event) {
    const link = event.target.closest("a[data-step]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || link.dataset.run !== this.panel.dataset.graph) return;
    event.preventDefault();
    if (!this.isWhole && link.textContent.trim().startsWith("…")) this.unfold(true, link.dataset.step);
    else document.dispatchEvent(new CustomEvent("killick:show-step", { detail: { step: link.dataset.step } }));
  }
}

for (const panel of document.querySelectorAll("[data-graph]")) new Drawing(panel);

// The drawing of a run: fetched when the page is there, drawn anew when the run went on. Its steps are links.

const SETTLED_MS = 250;

class Drawing {
  constructor(panel) {
    this.panel = panel;
    this.body = panel.querySelector("[data-graph-drawn]");
    this.turn = 0;
    this.timer = 0;
    this.body.addEventListener("click", (event) => this.chosen(event));
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
    // What nobody looks at is drawn when they do.
    clearTimeout(this.timer);
    if (this.isSeen && this.isStale) this.timer = setTimeout(() => this.draw(!this.turn), ms);
  }

  async draw(isFirst) {
    const turn = (this.turn += 1);
    this.isStale = false;
    try {
      const answer = await fetch(this.panel.dataset.picture);
      const text = await answer.text();
      if (turn !== this.turn) return;
      if (!answer.ok) throw new Error(JSON.parse(text).detail);
      const picture = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
      if (picture.localName !== "svg") throw new Error("the drawing cannot be read");
      this.show(document.importNode(picture, true), isFirst);
    } catch (error) {
      if (turn === this.turn) this.panel.querySelector("[data-graph-told]").textContent = error.message;
    } finally {
      this.body.setAttribute("aria-busy", "false");
    }
  }

  show(picture, isFirst) {
    const { scrollLeft, scrollTop } = this.body;
    const focused = document.activeElement?.closest?.("[data-graph-drawn] a")?.getAttribute("href");
    this.body.replaceChildren(picture);
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

  chosen(event) {
    const link = event.target.closest("a[data-step]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || link.dataset.run !== this.panel.dataset.graph) return;
    event.preventDefault();
    document.dispatchEvent(new CustomEvent("killick:show-step", { detail: { step: link.dataset.step } }));
  }
}

for (const panel of document.querySelectorAll("[data-graph]")) new Drawing(panel);

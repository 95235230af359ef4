// What somebody who cannot see the page well, or has no mouse, would trip over. Gives back one line for each thing.
() => {
  const wrong = [];
  const shown = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  const where = (element) => {
    const id = element.id ? `#${element.id}` : "";
    const kind = element.getAttribute("class");
    return `<${element.localName}${id}${kind ? ` class="${kind}"` : ""}> ${(element.textContent || "").trim().slice(0, 40)}`;
  };

  // The frame of the page.
  if (!document.documentElement.lang) wrong.push("the page does not say which language it is in");
  if (!document.title.trim()) wrong.push("the page has no title");
  for (const landmark of ["main", "header", "nav", "footer"]) {
    if (landmark !== "nav" && !document.querySelector(`body > ${landmark}`)) wrong.push(`no ${landmark}`);
  }
  if (document.querySelectorAll("main").length !== 1) wrong.push("not one main");
  for (const nav of document.querySelectorAll("nav")) {
    if (!nav.getAttribute("aria-label") && !nav.getAttribute("aria-labelledby")) wrong.push(`a nav without a name: ${where(nav)}`);
  }

  // Headings, in order.
  let level = 0;
  let first = 0;
  for (const heading of [...document.querySelectorAll("main h1, main h2, main h3, main h4, main h5, main h6")].filter(shown)) {
    const is = Number(heading.localName[1]);
    if (is === 1) first += 1;
    if (is > level + 1) wrong.push(`a heading skips a level (${level} to ${is}): ${where(heading)}`);
    if (!heading.textContent.trim()) wrong.push("a heading without words");
    level = is;
  }
  if (first !== 1) wrong.push(`${first} h1 on the page`);

  // Ids and what refers to them.
  const ids = new Set();
  for (const each of document.querySelectorAll("[id]")) {
    if (ids.has(each.id)) wrong.push(`an id twice: ${each.id}`);
    ids.add(each.id);
  }
  for (const name of ["aria-labelledby", "aria-describedby", "aria-controls", "for"]) {
    for (const each of document.querySelectorAll(`[${name}]`)) {
      for (const id of each.getAttribute(name).split(/\s+/).filter(Boolean)) {
        if (!document.getElementById(id)) wrong.push(`${name} names ${id}, which is not there: ${where(each)}`);
      }
    }
  }

  // Controls have names.
  const named = (element) => {
    const by = (element.getAttribute("aria-labelledby") || "").split(/\s+/).filter(Boolean);
    const words = [
      element.getAttribute("aria-label"), element.title, ...by.map((id) => document.getElementById(id)?.textContent),
      ...[...(element.labels || [])].map((label) => label.textContent),
      element.matches("button, a, summary, [role=button]") ? element.textContent : "",
      element.querySelector?.("img[alt]")?.alt, element.querySelector?.("svg title")?.textContent,
      element.matches("input[type=submit], input[type=button]") ? element.value : "",
    ];
    return words.some((each) => each && each.trim());
  };
  const controls = "a[href], button, input:not([type=hidden]), select, textarea, summary, [role=button], [role=slider], [tabindex]:not([tabindex='-1'])";
  for (const each of [...document.querySelectorAll(controls)].filter(shown)) {
    if (each.matches("pre[tabindex], main, div[tabindex], svg[tabindex]") && each.textContent.trim()) continue;
    if (!named(each)) wrong.push(`a control without a name: ${where(each)}`);
  }
  for (const each of document.querySelectorAll("img:not([alt]), svg[role=img]:not([aria-label]):not([aria-labelledby])")) {
    if (!each.querySelector("title")) wrong.push(`a picture without words: ${where(each)}`);
  }
  for (const each of document.querySelectorAll("th")) {
    if (!each.textContent.trim() && !each.getAttribute("aria-label") && !each.querySelector("[aria-label]")) wrong.push(`a column without a name: ${where(each.closest("table"))}`);
  }
  for (const each of document.querySelectorAll("[style], [onclick], [onload], [onerror], [onfocus], [onmouseover]")) {
    if (!each.closest("svg")) wrong.push(`a style or a handler in the page itself: ${where(each)}`);
  }

  // Contrast.
  const parse = (text) => {
    const found = text.match(/^rgba?\(([^)]+)\)$/);
    if (!found) return null;
    const [r, g, b, a = 1] = found[1].split(/[\s,/]+/).filter(Boolean).map(Number);
    return [r, g, b, a];
  };
  const over = (top, under) => [0, 1, 2].map((n) => top[n] * top[3] + under[n] * (1 - top[3])).concat(1);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((each) => {
      const part = each / 255;
      return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      if (colour && colour[3] > 0) layers.push(colour);
      if (colour && colour[3] === 1) break;
    }
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const seen = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || !element || seen.has(element)) continue;
    seen.add(element);
    if (element.closest("script, style, title, .visually-hidden, .skip, [disabled], [aria-disabled=true], option, desc")) continue;
    if (!shown(element)) continue;
    const style = getComputedStyle(element);
    const ink = parse(element.closest("svg") && element.closest("text, tspan") ? style.fill : style.color);
    if (!ink) continue;
    let alpha = ink[3];
    for (let each = element; each; each = each.parentElement) alpha *= Number(getComputedStyle(each).opacity);
    if (element.closest("svg") && element.closest("svg").querySelector("rect")) continue;
    const under = ground(element);
    const [a, b] = [light(over([...ink.slice(0, 3), alpha], under)), light(under)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) wrong.push(`contrast ${ratio.toFixed(2)}: ${where(element)}`);
  }
  return wrong;
}

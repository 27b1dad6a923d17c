"""What a reader would complain of on a page in a browser, found by measuring; each list is empty on a good page."""

from __future__ import annotations

# Elements that reach beyond the window, and are not inside a box that scrolls.
OVERFLOW = """() => {
  const width = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth > width) found.push(`the page: ${document.documentElement.scrollWidth}`);
  for (const element of document.body.querySelectorAll("*")) {
    if (element.closest(".scroll") && !element.matches(".scroll")) continue;
    const box = element.getBoundingClientRect();
    if (box.width && box.height && element.checkVisibility() && (box.right > width + 1 || box.left < -1))
      if (getComputedStyle(element).clipPath === "none" && !element.closest(".stack thead"))
        found.push(`${element.localName}.${element.className}: ${box.left} to ${box.right}`);
  }
  return found;
}"""

# Of tables in a box that scrolls: the first column stays to be seen, and the last one can be scrolled to.
TABLES = """() => {
  const found = [];
  for (const box of document.querySelectorAll(".scroll")) {
    if (!box.querySelector("table") || !box.checkVisibility()) continue;
    box.scrollLeft = 1e6;
    const edge = box.getBoundingClientRect();
    for (const row of box.querySelectorAll("tbody tr")) {
      const [first, last] = [row.firstElementChild, row.lastElementChild].map((e) => e.getBoundingClientRect());
      if (first.left < edge.left - 1 || first.right > edge.right + 1)
        found.push(`first of ${row.textContent.slice(0, 60)}: ${first.left} to ${first.right}`);
      if (last.right > edge.right + 1) found.push(`last of ${row.textContent.slice(0, 60)}: ${last.right}`);
      if (edge.width - first.width < 90) found.push(`no space next to ${row.textContent.slice(0, 60)}`);
    }
    box.scrollLeft = 0;
  }
  return found;
}"""

# Verdicts that are hidden without horizontal scrolling, or that are distinguished by color alone.
VERDICTS = """() => {
  const found = [], width = document.documentElement.clientWidth;
  const kinds = new Map();
  for (const each of document.querySelectorAll(".verdict")) {
    const box = each.getBoundingClientRect(), words = each.textContent.replace(/[^a-z ]/gi, "").trim();
    const sees = each.checkVisibility({opacityProperty: true, visibilityProperty: true, contentVisibilityAuto: true});
    if (!sees || box.width < 40 || box.height < 10 || box.left < 0 || box.right > width || each.closest(".scroll"))
      found.push(`${words}: ${box.left} to ${box.right}, ${sees}`);
    if (words.length < 5) found.push(`no words: ${each.textContent}`);
    const style = getComputedStyle(each), look = `${style.color} on ${style.backgroundColor}`;
    if (kinds.has(look) && kinds.get(look) !== each.className) found.push(`${look} means several verdicts`);
    kinds.set(look, each.className);
  }
  return found;
}"""

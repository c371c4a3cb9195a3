// What a person would see of a report, as data: run in the page by report_browser.py.
() => {
  const rgb = (text) => text.match(/[\d.]+/g).slice(0, 3).map(Number);
  const light = (text) => {
    const [r, g, b] = rgb(text).map((part) => part / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const seen = (element) => {
    const box = element.getBoundingClientRect();
    return getComputedStyle(element).visibility === "visible" && (box.width > 0 || box.height > 0);
  };
  const paper = getComputedStyle(document.body).backgroundColor;
  const figures = {};
  let faintest = 99, smallest = 99;
  const overlaps = [];
  for (const figure of document.querySelectorAll("figure")) {
    const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
    const drawn = {};
    for (const mark of svg.querySelectorAll(".mark")) {
      const number = [...mark.classList].find((name) => /^s\d+$/.test(name)).slice(1);
      const parts = [...mark.querySelectorAll("path, use, text")].filter(seen);
      drawn[number] = (drawn[number] || 0) + parts.length;
    }
    for (const text of svg.querySelectorAll("text")) {
      if (!seen(text)) continue;
      const badge = text.closest(".badge");
      const disc = badge && badge.querySelector("path");
      const ground = disc ? getComputedStyle(disc).fill : paper;
      faintest = Math.min(faintest, contrast(getComputedStyle(text).fill, ground));
      const scale = box.width / svg.viewBox.baseVal.width;
      if (!badge) smallest = Math.min(smallest, parseFloat(getComputedStyle(text).fontSize) * scale);
    }
    const labels = [...svg.querySelectorAll(".label text")].map((l) => [l.textContent, l.getBoundingClientRect()]);
    labels.forEach(([one, a], n) => labels.slice(n + 1).forEach(([other, b]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 2) overlaps.push(`${figure.id}: ${one} | ${other}`);
    }));
    figures[figure.id] = { width: box.width, height: box.height, drawn };
  }
  const bad = [...document.querySelectorAll("*")].filter((element) =>
    ["SCRIPT", "IMG", "IFRAME", "OBJECT", "EMBED", "LINK", "FORM"].includes(element.tagName)
    || [...element.attributes].some((a) => a.name.startsWith("on"))
    || ["href", "src"].some((name) => element.hasAttribute(name) && !element.getAttribute(name).startsWith("#")));
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  const dangling = [...document.querySelectorAll("use")].map((u) => u.getAttribute("href").slice(1))
    .concat([...document.querySelectorAll("[clip-path]")].map((e) => e.getAttribute("clip-path").slice(5, -1)))
    .filter((id) => !document.getElementById(id));
  return {
    title: document.title,
    figures, faintest, smallest, overlaps, dangling,
    inkOnPaper: contrast(getComputedStyle(document.body).color, paper),
    paper,
    bad: bad.map((element) => element.outerHTML.slice(0, 120)),
    twice: ids.filter((id, place) => ids.indexOf(id) !== place),
    concerns: [...document.querySelectorAll(".matrix tbody tr")].filter(seen).map((row) => row.querySelector("th").innerText),
    text: document.body.textContent.replace(/\s+/g, " "),
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  };
}

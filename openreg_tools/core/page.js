// Every page: the theme switch, hints (also by touch) for elements with a title, tables that sort and filter.
"use strict";

// ---- theme ----

const theme = document.getElementById("theme");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";

function themed() {
  theme.textContent = isDark() ? "\u2600" : "\u263e";
  theme.title = isDark() ? "light" : "dark";
  theme.setAttribute("aria-label", theme.title);
  dispatchEvent(new Event("themed"));
}

theme.hidden = false;
theme.onclick = () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  themed();
};
prefersDark.addEventListener("change", themed);
themed();

// ---- hints ----

const hint = document.body.appendChild(document.createElement("div"));
hint.id = "hint";
hint.hidden = true;

// Show text or an element beside a point of the window.
function showHint(content, x, y) {
  hint.replaceChildren(content);
  hint.hidden = false;
  const box = hint.getBoundingClientRect();
  const below = y + 18 + box.height < innerHeight;
  hint.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - box.width - 8))}px`;
  hint.style.top = `${below ? y + 18 : Math.max(8, y - box.height - 12)}px`;
}

// The text of an element's title, which moves to data-hint so that the browser does not show it too.
function hintOf(element) {
  const svg = element.querySelector?.(":scope > title");
  if (svg && element.closest("svg")) {
    element.dataset.hint = svg.textContent;
    svg.remove();
  }
  const titled = element.closest?.("[title], [data-hint]");
  if (titled?.title) {
    titled.dataset.hint = titled.title;
    titled.removeAttribute("title");
  }
  return titled?.dataset.hint;
}

for (const kind of ["pointerover", "pointerdown"])
  document.addEventListener(kind, (event) => {
    if (event.target.closest("canvas")) return;
    const words = event.target.closest("#theme") ? "" : hintOf(event.target);
    if (words) showHint(words, event.clientX, event.clientY);
    else hint.hidden = true;
  });
document.addEventListener("scroll", () => (hint.hidden = true), true);

// ---- tables ----

const UNITS = { ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };

// Classes of cells that a reader looks for, which sort before other text.
const URGENT = ["fail", "fixed", "warn", "known", "refused"];

function urgencyOf(cell) {
  const place = URGENT.indexOf(cell.className);
  return place < 0 ? URGENT.length : place;
}

// A cell's number, in its unit, or its text.
function valueOf(cell) {
  const words = cell.textContent.trim();
  const found = /^([-+]?(?:\d[\d.,]*(?:e[-+]?\d+)?|inf))(?: (\w+))?$/.exec(words);
  if (!found || (found[2] && !(found[2] in UNITS))) return words;
  const number = Number(found[1].replaceAll(",", "").replace("inf", "Infinity"));
  return Number.isNaN(number) ? words : number * (UNITS[found[2]] ?? 1);
}

function sort(table, column, head) {
  const rows = [...table.tBodies[0].rows];
  const numeric = rows.some((row) => typeof valueOf(row.cells[column]) === "number");
  const before = head.getAttribute("aria-sort");
  const sign = before ? (before === "ascending" ? -1 : 1) : numeric ? -1 : 1;
  const keyed = rows.map((row) => [valueOf(row.cells[column]), urgencyOf(row.cells[column]), row]);
  keyed.sort(([a, urgencyA], [b, urgencyB]) => {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1; // text, such as an empty cell, comes last
    if (typeof a === "number") return a === b ? 0 : sign * (a - b); // two infinities
    return sign * (urgencyA - urgencyB || a.localeCompare(b));
  });
  for (const each of head.parentNode.cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  table.tBodies[0].append(...keyed.map(([, , row]) => row));
}

for (const table of document.querySelectorAll("table")) {
  const head = table.tHead?.rows[0];
  if (!head) continue;
  [...head.cells].forEach((cell, column) => {
    cell.tabIndex = 0;
    cell.onclick = () => sort(table, column, cell);
    cell.onkeydown = (event) => event.key === "Enter" && sort(table, column, cell);
    if (table.tBodies[0].rows[0]?.cells[column]?.className === "number") cell.classList.add("number");
  });
  if (!table.classList.contains("filtered")) continue;
  const field = document.createElement("input");
  Object.assign(field, { type: "search", className: "filter", placeholder: "filter rows" });
  field.setAttribute("aria-label", "filter rows");
  field.oninput = () => {
    const words = field.value.toLowerCase();
    for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(words);
  };
  table.parentNode.before(field);
}

"use strict";
// What all parts of the page use: the data, the tooltip, colours, amounts as text.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");

function element(name, text, className) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function showTip(text, x, y) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = clamp(x + 14, 4, innerWidth - box.width - 4) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18) + "px";
}

// A canvas of this size in CSS pixels, sharp on every screen; its drawing context.
function sized(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  return pen;
}

function showBytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (count >= 1024 && unit < 5) { count /= 1024; unit += 1; }
  return (unit ? count.toFixed(1) : Math.round(count)) + " " + units[unit];
}

function showTime(micros) {
  if (micros >= 1e6) return (micros / 1e6).toPrecision(4) + " s";
  return micros >= 1e3 ? (micros / 1e3).toPrecision(4) + " ms" : Math.round(micros) + " µs";
}

// ---- the graph: zoom by buttons, or the wheel with Ctrl; drag to scroll --------------------------------------------

function graphPart() {
  const frame = byId("graph");
  const svg = frame.querySelector("svg");
  const width = svg.viewBox.baseVal.width, height = svg.viewBox.baseVal.height;
  let scale = 1;
  const set = (to) => {
    scale = clamp(to, 0.1, 4);
    svg.setAttribute("width", width * scale);
    svg.setAttribute("height", height * scale);
  };
  const fit = () => set(clamp((frame.clientWidth - 4) / width, 0.5, 1));
  byId("graph-in").onclick = () => set(scale * 1.25);
  byId("graph-out").onclick = () => set(scale / 1.25);
  byId("graph-fit").onclick = () => set((frame.clientWidth - 4) / width);
  frame.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    set(scale * (event.deltaY < 0 ? 1.15 : 1 / 1.15));
  }, { passive: false });
  let from = null;
  frame.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse") from = [event.clientX + frame.scrollLeft, event.clientY + frame.scrollTop];
  });
  addEventListener("pointermove", (event) => {
    if (from) frame.scrollTo(from[0] - event.clientX, from[1] - event.clientY);
  });
  addEventListener("pointerup", () => { from = null; });
  fit();
}

// ---- the table: only the rows that are looked for ------------------------------------------------------------------

function tablePart() {
  const rows = [...document.querySelectorAll("#tensor-table tbody tr")];
  const filter = byId("table-filter"), all = byId("table-all");
  const late = rows.map((row) => row.hidden); // the page shows the first ones only
  const show = () => {
    const wanted = filter.value.toLowerCase();
    rows.forEach((row, k) => {
      row.hidden = wanted ? !row.textContent.toLowerCase().includes(wanted) : !all.hidden && late[k];
    });
  };
  all.hidden = !late.includes(true);
  all.onclick = () => { all.hidden = true; show(); };
  filter.oninput = show;
}

"use strict";
// What all parts of the page share: the data, the tooltip, colours, amounts as text.

const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");

let printing = false; // or being prepared for it
const isDark = () => dark.matches && !printing;

// Parts of the page add what they do before it is printed and after that.
const beforePrinting = [];
const afterPrinting = [];
addEventListener("beforeprint", () => {
  printing = true;
  document.documentElement.classList.add("printing");
  beforePrinting.forEach((prepare) => prepare());
});
addEventListener("afterprint", () => {
  printing = false;
  document.documentElement.classList.remove("printing");
  afterPrinting.forEach((restore) => restore());
});

const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Show a tooltip next to a point; an empty text hides it.
function showTip(text, x, y) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  const below = y + 18;
  const fitsBelow = below + box.height <= innerHeight;
  tip.style.left = clamp(x + 14, 4, innerWidth - box.width - 4) + "px";
  tip.style.top = (fitsBelow ? below : Math.max(4, y - box.height - 10)) + "px";
}

// Give a canvas a size in CSS pixels that is sharp on every screen. Return its drawing context.
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
  while (count >= 1024 && unit < 5) {
    count /= 1024;
    unit += 1;
  }
  return (unit ? count.toFixed(1) : Math.round(count)) + " " + units[unit];
}

function showTime(micros) {
  if (micros >= 1e6) return (micros / 1e6).toPrecision(4) + " s";
  if (micros >= 1e3) return (micros / 1e3).toPrecision(4) + " ms";
  return Math.round(micros) + " µs";
}

// ---- the graph: buttons or Ctrl + wheel zoom, dragging scrolls ----------------------------------

function graphPart() {
  const frame = byId("graph");
  const svg = frame.querySelector("svg");
  const width = svg.viewBox.baseVal.width;
  const height = svg.viewBox.baseVal.height;
  let scale = 1;
  const setScale = (wanted) => {
    scale = clamp(wanted, 0.1, 4);
    svg.setAttribute("width", width * scale);
    svg.setAttribute("height", height * scale);
  };
  const fitting = () => (frame.clientWidth - 4) / width;
  byId("graph-in").onclick = () => setScale(scale * 1.25);
  byId("graph-out").onclick = () => setScale(scale / 1.25);
  byId("graph-fit").onclick = () => setScale(fitting());
  frame.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    setScale(scale * (event.deltaY < 0 ? 1.15 : 1 / 1.15));
  }, { passive: false });
  let dragged = null; // the point of the graph that the pointer holds
  frame.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse") return;
    dragged = { x: event.clientX + frame.scrollLeft, y: event.clientY + frame.scrollTop };
  });
  addEventListener("pointermove", (event) => {
    if (dragged) frame.scrollTo(dragged.x - event.clientX, dragged.y - event.clientY);
  });
  addEventListener("pointerup", () => { dragged = null; });
  setScale(clamp(fitting(), 0.5, 1));
}

// ---- the table: a filter, and a button that shows all rows --------------------------------------

function tablePart() {
  const rows = [...document.querySelectorAll("#tensor-table tbody tr")];
  const filter = byId("table-filter");
  const showAll = byId("table-all");
  const hiddenAtFirst = rows.map((row) => row.hidden);
  const update = () => {
    const wanted = filter.value.toLowerCase();
    const someHidden = !showAll.hidden && !printing;
    rows.forEach((row, k) => {
      // A row that stands for hidden ones is there only while these are hidden.
      if (row.classList.contains("fold")) row.hidden = Boolean(wanted) || !someHidden;
      else if (wanted) row.hidden = !row.textContent.toLowerCase().includes(wanted);
      else row.hidden = someHidden && hiddenAtFirst[k];
    });
  };
  showAll.hidden = !hiddenAtFirst.includes(true);
  showAll.onclick = () => {
    showAll.hidden = true;
    update();
  };
  filter.oninput = update;
  beforePrinting.push(update);
  afterPrinting.push(update);
}

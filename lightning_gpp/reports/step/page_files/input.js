// What the person does with mouse and keys, and the start of it all.

function place(event) {
  const frame = canvas.getBoundingClientRect();
  mouse.x = event.clientX - frame.left;
  mouse.y = event.clientY - frame.top;
}

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  place(event);
  const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? view.height : 1;
  const turned = (event.deltaY || event.deltaX) * unit;
  if (event.shiftKey || mouse.x < LEFT || mouse.x > view.width - RIGHT) {
    view.top += turned;
    redraw();
  } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    view.from += event.deltaX * unit / view.perSecond;
    redraw();
  } else {
    zoom(Math.exp(-turned * 0.002), mouse.x);
  }
  hover();
}, { passive: false });

canvas.addEventListener("pointerdown", (event) => {
  if (event.button) return;  // not the left one: its menu may swallow the end of a drag
  place(event);
  mouse.drag = { x: mouse.x, y: mouse.y, from: view.from, top: view.top };
  canvas.setPointerCapture(event.pointerId);
  canvas.classList.add("dragging");
  hover();
});

canvas.addEventListener("pointermove", (event) => {
  place(event);
  if (mouse.drag) {
    view.from = mouse.drag.from - (mouse.x - mouse.drag.x) / view.perSecond;
    view.top = mouse.drag.top - (mouse.y - mouse.drag.y);
  }
  redraw();
  hover();
});

for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) {
  canvas.addEventListener(name, () => {
    mouse.drag = null;
    canvas.classList.remove("dragging");
    hover();
  });
}

canvas.addEventListener("pointerleave", () => {
  mouse.x = mouse.y = -1;
  tip.hidden = true;
  redraw();
});

canvas.addEventListener("dblclick", (event) => {
  place(event);
  const row = rowAt(mouse.y), i = itemAt(row, mouse.x, mouse.y);
  if (i < 0 || !row.lane.seconds[i]) return fit();
  view.perSecond = plotWidth() / (row.lane.seconds[i] * 1.5);
  view.from = row.lane.start[i] - row.lane.seconds[i] * 0.25;
  return redraw();
});

canvas.addEventListener("keydown", (event) => {
  const middle = LEFT + plotWidth() / 2, shown = plotWidth() / view.perSecond;
  const moves = {
    "+": () => zoom(1.5, middle), "=": () => zoom(1.5, middle), "-": () => zoom(1 / 1.5, middle),
    "0": fit, ArrowLeft: () => { view.from -= shown * 0.1; }, ArrowUp: () => { view.top -= 60; },
    ArrowRight: () => { view.from += shown * 0.1; }, ArrowDown: () => { view.top += 60; },
  };
  // With another key they are the browser's own: it zooms with ctrl and "+".
  if (!moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  moves[event.key]();
  redraw();
});

for (const id of ["path", "dim", "links", "memory"]) {
  box(id).addEventListener("change", () => { layOut(); redraw(); });
}
box("fit").addEventListener("click", fit);

function resize() {
  const frame = canvas.parentElement.getBoundingClientRect(), dots = window.devicePixelRatio || 1;
  const isFirst = view.width === 0;
  view.width = frame.width;
  [LEFT, RIGHT] = frame.width < 700 ? [130, 14] : [190, 180];  // a phone has no room for notes
  view.height = frame.height;
  canvas.width = Math.round(frame.width * dots);
  canvas.height = Math.round(frame.height * dots);
  context.setTransform(dots, 0, 0, dots, 0, 0);
  if (isFirst) fit();
  else redraw();
}

function showLegend() {
  const entries = data.paints.filter((paint) => paint.legend !== null)
    .map((paint) => [paint.colour, paint.legend]);
  entries.push([data.colours.idle, "idle"]);
  for (const [colour, text] of entries) {
    const entry = document.createElement("span"), mark = document.createElement("i");
    mark.style.background = colour;
    entry.append(mark, text);
    box("legend").append(entry);
  }
}

showLegend();
layOut();
window.addEventListener("resize", resize);
// What the window does not tell: the legend wraps, or a frame around the page changes.
if (window.ResizeObserver) new ResizeObserver(resize).observe(canvas.parentElement);
resize();
